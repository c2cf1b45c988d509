"""Order and resume, for any sizes and any interruptions: every sample once, in the order of an undisturbed run."""

import itertools
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chance import stats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from overnight import trainer
from overnight.core.errors import BadInputError, DataError, DatasetChangedError
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import CheckpointName, Token, open_place
from overnight.trainer.data.loader import DataLoader
from overnight.trainer.data.mixture import MixtureOrder, apportion
from overnight.trainer.data.permutation import Permutation
from overnight.trainer.data.record import Audit, SampleRecord, audit
from overnight.trainer.rng import derive

SIGNIFICANCE = 1e-4
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in list(os.environ):
        if name.startswith("OVERNIGHT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


# -- any sizes, any interruptions -------------------------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """A global batch that 1, 2 and 3 ranks divide, a data set that it need not divide, and a tail rule."""
    micro = draw(st.integers(1, 3))
    global_batch = 6 * micro * draw(st.integers(1, 2))
    return {
        "length": draw(st.integers(global_batch, 5 * global_batch)),
        "epochs": draw(st.integers(1, 4)),
        "global_batch_size": global_batch,
        "micro_batch_size": draw(st.sampled_from([micro, None])),
        "tail": draw(st.sampled_from(["drop", "pad"])),
        "shuffle": draw(st.booleans()),
    }


class Trial:
    """Plays attempts of any number of ranks, with records and fences as a run writes them."""

    def __init__(self, folder: Path, size: dict[str, Any]) -> None:
        self.folder, self.size = folder, size
        self.place = open_place(folder / "checkpoints")
        self.state: dict[str, Any] | None = None
        self.step = 0
        self.parent: CheckpointName | None = None
        self.num_attempts = 0

    def loader(self, rank: int, ranks: int) -> DataLoader:
        options = {key: value for key, value in self.size.items() if key not in ("length", "epochs")}
        loader = DataLoader(range(self.size["length"]), pure=True, **options)
        loader.bind(rank=rank, world_size=ranks, seed=5)
        if self.state is not None:
            loader.load_state_dict(self.state)
        return loader

    def attempt(self, ranks: int, updates: int, lost: int) -> bool:
        """Trains ``updates`` updates, the last ``lost`` of them behind the last save; returns whether it is over."""
        self.num_attempts += 1
        token = Token(self.num_attempts)
        claim(self.place, token, self.parent)
        loaders = [self.loader(rank, ranks) for rank in range(ranks)]
        folder = self.folder / "attempts" / f"{token.attempt:04d}"
        records = [SampleRecord(folder, rank=r, world_size=ranks, attempt=token.attempt) for r in range(ranks)]
        step, saved = self.step, (self.step, loaders[0].state_dict())
        for record in records:
            record.declare(epochs=self.size["epochs"], samples_per_epoch=loaders[0].samples_per_epoch)
        for number in range(updates):
            if loaders[0].epoch >= self.size["epochs"]:
                break
            for loader, record in zip(loaders, records, strict=True):
                for batch in loader.micro_batches(loader.epoch, loader.position):
                    record.append(step, batch)
                    if batch.last_of_update:
                        break
                loader.advance()
            step += 1
            if number < updates - lost:
                saved = step, loaders[0].state_dict()
        for record in records:
            record.close()
        over = loaders[0].epoch >= self.size["epochs"]
        if over:
            saved = step, loaders[0].state_dict()
        self.step, self.state = saved
        self.parent = CheckpointName(self.step, token)
        self.place.path(self.parent).mkdir(exist_ok=True)
        return over


@given(sizes(), st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 7), st.integers(0, 3)), max_size=6))
@settings(max_examples=40, suppress_health_check=SLOW)
def test_no_sample_is_repeated_or_skipped_by_kills_and_resizes(
    tmp_path_factory: pytest.TempPathFactory, size: dict[str, Any], attempts: list[tuple[int, int, int]]
) -> None:
    trial = Trial(tmp_path_factory.mktemp("trial"), size)
    for ranks, updates, lost in attempts:
        if trial.attempt(ranks, updates, lost):
            break
    while not trial.attempt(2, 1000, 0):
        pass
    per_epoch = trial.loader(0, 1).samples_per_epoch
    counted = audit(trial.folder)
    total = per_epoch * size["epochs"]
    assert counted == Audit(expected=total, recorded=total, repeated=0, skipped=0, updates=trial.step)


@given(sizes(), st.data())
@settings(max_examples=40, suppress_health_check=SLOW)
def test_one_two_one_three_ranks_see_one_sequence(size: dict[str, Any], data: st.DataObject) -> None:
    trial = Trial(Path("unused"), size)
    whole: list[int] = []
    straight = trial.loader(0, 1)
    for epoch in range(size["epochs"]):
        for batch in straight.micro_batches(epoch, 0):
            whole += batch.indices.tolist()
    seen: dict[tuple[int, int], list[int]] = {}
    for ranks in itertools.cycle((1, 2, 1, 3)):
        loaders = [trial.loader(rank, ranks) for rank in range(ranks)]
        for _ in range(data.draw(st.integers(1, 5))):
            if loaders[0].epoch >= size["epochs"]:
                break
            for loader in loaders:
                for batch in loader.micro_batches(loader.epoch, loader.position):
                    seen[batch.epoch, batch.first] = batch.indices.tolist()
                    if batch.last_of_update:
                        break
                loader.advance()
        trial.state = loaders[0].state_dict()
        if loaders[0].epoch >= size["epochs"]:
            break
    assert [index for key in sorted(seen) for index in seen[key]] == whole


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 30))
def test_an_iterator_made_before_the_state_was_loaded_goes_on_like_one_made_after(
    length: int, batch: int, consumed: int
) -> None:
    one, early, late = (
        DataLoader(range(length), batch_size=min(batch, length), shuffle=True, seed=1) for _ in range(3)
    )
    for loader in (one, early, late):
        loader.bind(rank=0, world_size=1)
    one.advance(consumed)
    before = iter(early)
    early.load_state_dict(one.state_dict())
    late.load_state_dict(one.state_dict())
    assert [b.tolist() for b in before] == [b.tolist() for b in late]


# -- a run with acknowledgements --------------------------------------------------------------------------------------


def run_with_acks(length: int, epochs: int, delay: int, kill_at: list[int], every: int) -> tuple[list[int], Audit]:
    """A training that holds ``delay`` updates in flight; leaves by an exception at the given steps.

    Returns:
        The samples that the surviving lineage trained on, and what the records say.
    """

    class Killed(Exception):
        pass

    trained: dict[str, list[int]] = {}
    for stop in (*kill_at, None):
        trained = {"seen": []}
        try:
            with trainer.run(every=every) as run:
                run.track(trained=trained)
                loader = DataLoader(range(length), batch_size=3, shuffle=True, ack="manual", pure=True)
                flight: list[list[int]] = []
                for batch in run.batches(loader, epochs=epochs):
                    flight.append(batch.tolist())
                    if len(flight) > delay:
                        trained["seen"] += flight.pop(0)
                        loader.advance()
                    if run.step == stop:
                        raise Killed
                for _ in run.steps(delay):
                    if flight:
                        trained["seen"] += flight.pop(0)
                        loader.advance()
        except Killed:
            continue
    return trained["seen"], audit(run.trial_dir)


@given(
    length=st.integers(3, 20),
    epochs=st.integers(1, 3),
    delay=st.integers(0, 5),
    kill_at=st.lists(st.integers(1, 25), max_size=3),
    every=st.integers(1, 4),
)
@settings(max_examples=15, suppress_health_check=SLOW)
def test_what_was_in_flight_at_a_kill_is_given_again_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    epochs: int,
    delay: int,
    kill_at: list[int],
    every: int,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("run"))
    seen, counted = run_with_acks(length, epochs, delay, kill_at, every)
    assert Counter(seen) == Counter({index: epochs for index in range(length)})
    for epoch in range(epochs):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert (counted.recorded, counted.repeated, counted.skipped) == (epochs * length, 0, 0)
    assert counted.expected == epochs * length


def test_unacknowledged_samples_are_missed_by_the_audit() -> None:
    with trainer.run(every=None) as run:
        loader = DataLoader(range(12), batch_size=3, ack="manual", pure=True)
        for _ in run.batches(loader):
            if run.step < 3:
                loader.advance()
    counted = audit(run.trial_dir)
    assert (counted.expected, counted.recorded, counted.skipped) == (12, 6, 6)


def test_more_cannot_be_acknowledged_than_was_given() -> None:
    message = r"advanced to epoch 0, position 9, but .* up to epoch 0, position 6"
    with pytest.raises(DataError, match=message), trainer.run(every=None) as run:
        loader = DataLoader(range(12), batch_size=3, ack="manual", pure=True)
        for _ in run.batches(loader):
            if run.step == 2:
                loader.advance(3)


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_what_is_in_flight_outlives_the_end_of_its_epoch(stop: int) -> None:
    trained: dict[str, list[int]] = {}

    def attempt(stop: int | None) -> None:
        trained.update(seen=[])
        with trainer.run(every=None) as run:
            run.track(trained=trained)
            loader = DataLoader(range(6), batch_size=2, shuffle=True, ack="manual", pure=True)
            flight: list[list[int]] = []
            for _ in run.epochs(3):
                for batch in run.batches(loader):
                    flight.append(batch.tolist())
                    if len(flight) > 4:
                        trained["seen"] += flight.pop(0)
                        loader.advance()
                    if run.step == stop:
                        os.kill(os.getpid(), signal.SIGTERM)
            for _ in run.steps(4):
                trained["seen"] += flight.pop(0)
                loader.advance()
            counted.append(audit(run.trial_dir))

    counted: list[Audit] = []
    with pytest.raises(trainer.Yielded):
        attempt(stop)
    attempt(None)
    assert [sorted(trained["seen"][at : at + 6]) for at in (0, 6, 12)] == [list(range(6))] * 3
    assert len(trained["seen"]) == 18


def test_a_second_loop_goes_on_behind_what_the_first_left_in_flight() -> None:
    with trainer.run(every=None) as run:
        loader = DataLoader(range(8), batch_size=2, ack="manual", pure=True)
        first, second = [], []
        for batch in run.batches(loader):
            first += batch.tolist()
            if run.step == 2:
                break
        for batch in run.batches(loader):
            second += batch.tolist()
    assert (first, second) == ([0, 1, 2, 3], list(range(8)))


# -- seeds and distributions ------------------------------------------------------------------------------------------


def test_seeds_of_ids_are_a_function_of_id_and_trial_alone() -> None:
    with trainer.run(seed=4) as run:
        seeds = run.seeds([3, "3", "prompt", -1])
        torch.rand(3)
        assert run.seeds(["prompt"]) == [seeds[2]]
        assert (
            run.seeds([3, "3", "prompt", -1])
            == seeds
            == [derive(4, "generation", one) for one in (3, "3", "prompt", -1)]
        )
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    sys.argv = ["script.py", "--fresh"]
    with trainer.run(seed=5) as run:
        assert not set(run.seeds([3, "3", "prompt", -1])) & set(seeds)
        assert run.seeds([]) == []


# A promise across versions: a rollout that is generated again must be the same one.
def test_seeds_of_ids_are_the_same_in_every_version() -> None:
    with trainer.run(seed=7) as run:
        assert run.seeds([0, 1, "a"]) == [5260038192034681213, 539114356678698073, 8111257315076973757]


def test_seeds_of_ids_are_uniform() -> None:
    seeds = np.array([derive(11, "generation", one) for one in range(20_000)], dtype=np.uint64)
    for shift in (0, 20, 55):
        cells = (seeds >> np.uint64(shift)) & np.uint64(255)
        assert stats().chisquare(np.bincount(cells.astype(int), minlength=256)).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("length", [13, 4099])
def test_over_epochs_a_sample_comes_anywhere_in_the_order(length: int) -> None:
    loader = DataLoader(range(length), batch_size=1, shuffle=True, seed=3)
    loader.bind(rank=0, world_size=1)
    num_epochs, num_cells = 3000, 13
    places = np.empty(num_epochs, dtype=np.int64)
    first = np.empty(num_epochs, dtype=np.int64)
    for epoch in range(num_epochs):
        order = Permutation(length, derive(loader.seed, "permutation", epoch))(np.arange(length))
        places[epoch], first[epoch] = np.flatnonzero(order == 7)[0], order[0]
    expected = np.bincount(np.arange(length) * num_cells // length) / length * num_epochs
    for seen in (places, first):
        assert (
            stats().chisquare(np.bincount(seen * num_cells // length, minlength=num_cells), expected).pvalue
            > SIGNIFICANCE
        )
    pairs = np.zeros((num_cells, num_cells))
    np.add.at(pairs, (places[:-1] * num_cells // length, places[1:] * num_cells // length), 1)
    assert stats().chi2_contingency(pairs).pvalue > SIGNIFICANCE


def test_augmentation_seeds_are_uniform_over_positions_and_epochs() -> None:
    class Uniform:
        def __len__(self) -> int:
            return 2000

        def __getitem__(self, index: int) -> list[float]:
            return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    loader = DataLoader(Uniform(), batch_size=500, shuffle=True, seed=1, collate_fn=np.array)
    loader.bind(rank=0, world_size=1)
    drawn = np.concatenate([batch.data for epoch in range(5) for batch in loader.micro_batches(epoch, 0)])
    for column in drawn.T:
        assert stats().kstest(column, "uniform").pvalue > SIGNIFICANCE
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 0.04
    assert len(np.unique(drawn[:, 2])) > 9_900  # torch draws 24 bits: a few meet by chance
    assert abs(np.corrcoef(drawn[:2000, 0], drawn[2000:4000, 0])[0, 1]) < 0.1


PARTS = st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 10)), min_size=1, max_size=5)


@given(PARTS, st.integers(0, 3), st.integers(0, 200))
@settings(max_examples=30)
def test_a_mixture_is_the_same_for_any_ranks_and_from_any_position(
    parts: list[tuple[int, float]], epoch: int, start: int
) -> None:
    dataset = ConcatDataset([list(range(1000 * part, 1000 * part + length)) for part, (length, _) in enumerate(parts)])
    options: dict[str, Any] = {"num_samples": 240, "global_batch_size": 12, "micro_batch_size": 2, "seed": 9}
    drawn: dict[int, dict[int, list[int]]] = {}
    for ranks in (1, 2, 3):
        drawn[ranks] = {}
        for rank in range(ranks):
            loader = DataLoader(dataset, mixture=[share for _, share in parts], **options)
            loader.bind(rank=rank, world_size=ranks)
            for batch in loader.micro_batches(epoch, 12 * (start // 12)):
                drawn[ranks][batch.first] = batch.data.tolist()
    assert drawn[1] == drawn[2] == drawn[3]


@given(PARTS, st.integers(1, 300), st.integers(1, 6))
@settings(max_examples=60)
def test_a_mixture_takes_its_shares_and_goes_through_each_part_before_it_comes_again(
    parts: list[tuple[int, float]], num_samples: int, num_epochs: int
) -> None:
    lengths, shares = [length for length, _ in parts], [share for _, share in parts]
    order = MixtureOrder(lengths, shares, num_samples, seed=3)
    part_of = np.repeat(np.arange(len(parts)), lengths)
    total = np.zeros(sum(lengths), dtype=np.int64)
    for epoch in range(num_epochs):
        drawn = order.indices(epoch, np.arange(num_samples))
        assert np.bincount(part_of[drawn], minlength=len(parts)).tolist() == order.counts
        total += np.bincount(drawn, minlength=len(total))
    for part in range(len(parts)):
        seen = total[part_of == part]
        assert seen.max() - seen.min() <= 1
    for count, share in zip(order.counts, shares, strict=True):
        assert abs(count - num_samples * share / sum(shares)) < 1 + 1e-9


@given(st.integers(0, 2**62), st.lists(st.floats(0, 1e300), min_size=1, max_size=8).filter(any))
def test_shares_are_rounded_so_that_they_add_up(total: int, shares: list[float]) -> None:
    counts = apportion(total, shares)
    assert sum(counts) == total
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if not share)


# A promise across versions, as the permutation is.
def test_mixtures_are_the_same_in_every_version() -> None:
    order = MixtureOrder([5, 3, 7], [1.0, 2.0, 0.5], 14, seed=3)
    assert order.counts == [4, 8, 2]
    assert order.indices(0, np.arange(14)).tolist() == [8, 2, 7, 1, 0, 6, 5, 7, 4, 7, 5, 5, 6, 11]
    assert order.indices(1, np.arange(14)).tolist() == [3, 2, 9, 6, 5, 3, 6, 6, 6, 13, 1, 7, 5, 7]


def test_the_parts_of_a_mixture_are_interleaved_uniformly() -> None:
    lengths, shares = [40, 4000, 4], [0.2, 0.5, 0.3]
    order = MixtureOrder(lengths, shares, 5000, seed=8)
    part_of = np.repeat([0, 1, 2], lengths)
    places = np.zeros((3, 10))
    first = np.zeros(3)
    for epoch in range(200):
        drawn = part_of[order.indices(epoch, np.arange(5000))]
        np.add.at(places, (drawn, np.arange(5000) // 500), 1)
        first[drawn[0]] += 1
    for part in range(3):
        assert stats().chisquare(places[part]).pvalue > SIGNIFICANCE
    assert stats().chisquare(first, np.array(shares) * 200).pvalue > SIGNIFICANCE


def test_a_mixture_of_huge_parts_is_asked_at_any_position_at_once() -> None:
    order = MixtureOrder([10**11, 10**9], [0.5, 0.5], 10**10, seed=1)
    drawn = order.indices(7, np.array([0, 10**10 - 1, 123_456_789]))
    assert drawn.tolist() == [int(order.indices(7, np.array([place]))[0]) for place in (0, 10**10 - 1, 123_456_789)]
    assert ((drawn >= 0) & (drawn < 10**11 + 10**9)).all()


def test_a_mixture_goes_on_in_its_place_and_refuses_other_shares() -> None:
    dataset = ConcatDataset([list(range(10)), list(range(100, 130))])

    def mixed(shares: list[float]) -> DataLoader:
        loader = DataLoader(dataset, batch_size=4, mixture=shares, seed=2)
        loader.bind(rank=0, world_size=1)
        return loader

    loader = mixed([1, 3])
    loader.advance(13)
    state = loader.state_dict()
    again = mixed([2, 6])  # the same shares in other words
    again.load_state_dict(state)
    straight = mixed([1, 3])
    expected = [batch.data.tolist() for batch in straight.micro_batches(1, 12)]
    assert [batch.tolist() for batch in again] == expected
    with pytest.raises(DatasetChangedError, match="an order with hash"):
        mixed([1, 1]).load_state_dict(state)


@pytest.mark.parametrize(
    ("dataset", "shares", "message"),
    [
        (list(range(10)), [1.0], "ConcatDataset"),
        (ConcatDataset([range(3), range(4)]), [1.0], "2 data sets but 1"),
        (ConcatDataset([range(3), range(4)]), [0.0, 0.0], "at least one is positive"),
        (ConcatDataset([range(3), range(4)]), [float("nan"), 1.0], "finite"),
        (ConcatDataset([range(3), range(0)]), [1.0, 1.0], "empty"),
    ],
)
def test_mixtures_that_mean_nothing_are_refused(dataset: Any, shares: list[float], message: str) -> None:
    with pytest.raises((BadInputError, DataError), match=message):
        DataLoader(dataset, batch_size=1, mixture=shares).bind(rank=0, world_size=1)


def test_a_mixture_excludes_other_orders() -> None:
    with pytest.raises(BadInputError, match="shuffle and mixture exclude"):
        DataLoader(ConcatDataset([range(3)]), mixture=[1.0], shuffle=True)

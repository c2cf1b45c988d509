"""The loader alone: torch's meanings, the tail, the state, and what it refuses."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from overnight.core.errors import BadInputError, DataError, DatasetChangedError, IndivisibleBatchError
from overnight.trainer import rng
from overnight.trainer.data.loader import DataLoader, MicroBatch


class Noisy:
    """Draws from every default generator for each sample, and counts how often it is asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        return {"index": index, "noise": torch.rand(2), "pair": (random.random(), np.random.normal())}


def noise_by_index(batches: list[dict[str, Any]]) -> dict[int, list[float]]:
    found = {}
    for batch in batches:
        first, second = batch["pair"]
        for row, index in enumerate(batch["index"].tolist()):
            found[index] = [*batch["noise"][row].tolist(), float(first[row]), float(second[row])]
    return found


def bound(dataset: Any, rank: int = 0, world_size: int = 1, seed: int = 1, **options: Any) -> DataLoader:
    loader = DataLoader(dataset, **options)
    loader.bind(rank=rank, world_size=world_size, seed=seed)
    return loader


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


@pytest.mark.parametrize("length", [0, 1, 3, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_alone_it_gives_what_torch_gives(length: int, drop_last: bool) -> None:
    data: Any = list(range(length))
    if drop_last and 0 < length < 3:
        return
    expected = list(torch.utils.data.DataLoader(data, batch_size=3, drop_last=drop_last))
    loader = DataLoader(data, batch_size=3, drop_last=drop_last)
    got = list(loader)
    assert [batch.tolist() for batch in got] == [batch.tolist() for batch in expected]
    assert len(loader) == len(expected)


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tiny_data_sets(length: int, shuffle: bool) -> None:
    loader = bound(range(length), batch_size=2, shuffle=shuffle)
    for _ in range(3):
        assert sorted(flat(loader)) == list(range(length))
    padded = bound(range(length), global_batch_size=4, tail="pad", shuffle=shuffle)
    batches = list(padded.micro_batches(0, 0))
    assert len(batches) == (length > 0)
    assert sum(float(batch.weights.sum()) for batch in batches if batch.weights is not None) == length


def test_an_epoch_that_would_always_be_empty_is_refused() -> None:
    with pytest.raises(DataError, match="every epoch would be empty") as caught:
        bound(range(3), global_batch_size=4)
    assert 'tail="pad"' in caught.value.hint


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.tensor([i, i]), i),
        lambda i: {"x": torch.tensor(i), "deep": {"y": [i, float(i)]}},
        lambda i: np.full(3, i),
        lambda i: f"text {i}",
    ],
)
def test_every_kind_of_item_is_collated_as_torch_does(make: Any) -> None:
    data: Any = [make(i) for i in range(5)]
    for ours, theirs in zip(
        DataLoader(data, batch_size=2), torch.utils.data.DataLoader(data, batch_size=2), strict=True
    ):
        assert repr(ours) == repr(theirs)


def test_a_collate_function_and_batched_reading_are_used() -> None:
    class Batched(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("many", index) for index in indices]

    loader = DataLoader(Batched(torch.arange(4)), batch_size=4, collate_fn=list, pure=True)
    assert list(loader) == [[("many", 0), ("many", 1), ("many", 2), ("many", 3)]]


def test_each_pass_is_an_epoch_of_its_own() -> None:
    loader = bound(range(50), batch_size=7, shuffle=True)
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert (loader.epoch, loader.position) == (2, 0)
    loader.set_epoch(0)
    assert flat(loader) == first


def test_leaving_early_starts_the_next_epoch_and_peeking_consumes_nothing() -> None:
    loader = bound(range(50), batch_size=5, shuffle=True)
    peeked = next(iter(loader)).tolist()
    assert (loader.epoch, loader.position) == (0, 0)
    for number, batch in enumerate(loader):
        if number == 0:
            assert batch.tolist() == peeked
        if number == 2:
            break
    assert (loader.epoch, loader.position) == (0, 10)
    assert sorted(flat(loader)) == list(range(50))
    assert (loader.epoch, loader.position) == (2, 0)


def test_sequential_early_exits_see_the_same_batches_again() -> None:
    loader = DataLoader(range(20), batch_size=4)
    seen = []
    for _ in range(3):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number == 1:
                break
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


def test_manual_acknowledgement_separates_given_from_consumed() -> None:
    loader = bound(range(12), batch_size=2, ack="manual")
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    assert loader.position == 0
    loader.advance()
    assert loader.state_dict()["position"] == 2
    loader.advance(5)
    assert (loader.epoch, loader.position) == (1, 0)


def test_micro_batches_say_where_they_are() -> None:
    ranks = [bound(range(26), rank, 2, global_batch_size=8, micro_batch_size=2) for rank in range(2)]
    assert [(loader.accumulate, loader.updates_per_epoch, loader.samples_per_epoch) for loader in ranks] == [
        (2, 3, 24)
    ] * 2
    assert len(ranks[0]) == 6
    batches: list[MicroBatch] = list(ranks[1].micro_batches(0, 8))
    assert [batch.indices.tolist() for batch in batches] == [[10, 11], [14, 15], [18, 19], [22, 23]]
    assert [batch.position for batch in batches] == [8, 8, 16, 16]
    assert [batch.end for batch in batches] == [16, 16, 24, 24]
    assert [batch.index_in_update for batch in batches] == [0, 1, 0, 1]
    assert [batch.last_of_update for batch in batches] == [False, True] * 2
    assert all(batch.indices.dtype == np.int64 and batch.accumulate == 2 and batch.weights is None for batch in batches)
    assert batches[0].data.tolist() == [10, 11]


def test_padding_is_marked() -> None:
    seen: list[int] = []
    for rank in range(2):
        loader = bound(range(10), rank, 2, global_batch_size=8, micro_batch_size=2, tail="pad", shuffle=True)
        assert (loader.updates_per_epoch, loader.samples_per_epoch) == (2, 10)
        for batch in loader.micro_batches(0, 0):
            assert len(batch.data) == 2
            assert batch.weights is loader.sample_weight
            seen += batch.data[loader.sample_weight > 0].tolist()
    assert sorted(seen) == list(range(10))


def test_sample_weight_is_one_without_padding() -> None:
    loader = bound(range(5), batch_size=3)
    with pytest.raises(DataError, match="no current batch"):
        _ = loader.sample_weight
    assert [loader.sample_weight.tolist() for _ in loader] == [[1, 1, 1], [1, 1]]


def test_augmentation_belongs_to_the_sample_not_to_the_reader() -> None:
    alone = bound(Noisy(48), batch_size=5, shuffle=True, seed=4)
    expected = noise_by_index(list(alone))
    assert len(expected) == 48
    found: dict[int, list[float]] = {}
    for rank in range(3):
        loader = bound(Noisy(48), rank, 3, global_batch_size=12, micro_batch_size=2, shuffle=True, seed=4)
        found |= noise_by_index([batch.data for batch in loader.micro_batches(0, 0)])
    assert found == expected
    assert noise_by_index(list(alone)) != expected


def test_repeated_draws_of_one_sample_are_augmented_differently() -> None:
    loader = bound(Noisy(2), batch_size=8, weights=[1, 1], num_samples=8)
    noise = next(iter(loader))["noise"]
    assert len(torch.unique(noise[:, 0])) == 8


def test_collating_is_seeded_by_the_first_position() -> None:
    def mix(samples: list[int]) -> tuple[list[int], float]:
        return samples, float(torch.rand(())) + random.random() + float(np.random.rand())

    whole = list(bound(range(24), global_batch_size=8, micro_batch_size=4, collate_fn=mix))
    assert len({value for _, value in whole}) == 6
    halves = [
        batch.data
        for rank in range(2)
        for batch in bound(range(24), rank, 2, global_batch_size=8, micro_batch_size=4, collate_fn=mix).micro_batches(
            0, 0
        )
    ]
    assert sorted(halves) == sorted(whole)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"weights": [1.0] * 9}, {"pure": True}])
def test_the_process_generators_are_left_alone(options: dict[str, Any]) -> None:
    dataset: Any = range(9) if options.get("pure") else Noisy(9)
    with rng.isolated():
        rng.seed_all(1)
        np.random.normal()
        before = rng.capture()
        loader = bound(dataset, batch_size=2, **options)
        list(loader), loader.state_dict()
        after = rng.capture()
    assert str(before) == str(after)
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["numpy"]["words"], after["numpy"]["words"])


def test_an_error_names_the_sample() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            return {"other": 1}["missing" if index == 3 else "other"]

    with pytest.raises(KeyError) as caught:
        list(DataLoader(Broken(6), batch_size=2))
    assert "while reading sample 3 of Broken" in caught.value.__notes__


def test_a_state_goes_on_in_the_middle_and_at_the_end_of_an_epoch() -> None:
    undisturbed = bound(range(20), batch_size=4, shuffle=True)
    expected = [flat(undisturbed) for _ in range(4)]
    source = bound(range(20), batch_size=4, shuffle=True)
    for updates in range(16):
        state = source.state_dict()
        resumed = bound(range(20), batch_size=4, shuffle=True)
        next(iter(resumed))
        early = iter(resumed)
        resumed.load_state_dict(state)
        epoch, offset = divmod(updates, 5)
        assert flat(early) == expected[epoch][offset * 4 :]
        if epoch < 3:
            assert flat(resumed) == expected[epoch + 1]
        source.advance()
    assert source.state_dict()["epoch"] == 3
    assert source.state_dict()["position"] == 4


def test_a_state_is_plain_and_the_same_on_every_rank() -> None:
    states = [bound(range(20), rank, 2, global_batch_size=4, shuffle=True).state_dict() for rank in range(2)]
    assert states[0] == states[1]
    assert all(value is None or isinstance(value, int | str) for value in states[0].values())
    assert {"version", "epoch", "position", "dataset_length", "fingerprint", "global_batch", "seed"} <= set(states[0])


def test_the_saved_seed_wins_over_another_default() -> None:
    state = bound(range(30), batch_size=3, shuffle=True, seed=5).state_dict()
    expected = flat(bound(range(30), batch_size=3, shuffle=True, seed=5))
    resumed = bound(range(30), batch_size=3, shuffle=True, seed=6)
    resumed.load_state_dict(state)
    resumed.bind(rank=0, world_size=1, seed=6)
    assert flat(resumed) == expected


def test_loaders_of_other_names_have_other_orders_and_an_explicit_seed_decides_alone() -> None:
    def order(**options: Any) -> list[int]:
        seed = options.pop("run_seed", 1)
        loader = DataLoader(range(30), batch_size=3, shuffle=True, **options)
        loader.bind(rank=0, world_size=1, seed=seed)
        return flat(loader)

    assert order(name="a") != order(name="b")
    assert order(run_seed=1) != order(run_seed=2)
    assert order(seed=7, name="a", run_seed=1) == order(seed=7, name="b", run_seed=2)


class Changed:
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([self.values[index]]), "augmented": torch.rand(1)}


def changed_loader(values: list[float], **options: Any) -> DataLoader:
    return bound(Changed(values), batch_size=2, shuffle=True, **options)


def test_other_data_is_refused_before_a_sample_is_read() -> None:
    values = [float(value) for value in range(8)]
    source = changed_loader(values)
    source.advance()
    state = source.state_dict()
    changed_loader(values).load_state_dict(state)
    for other in ([*values, 8.0], values[:-1], [9.0, *values[1:]], [*values[:-1], 0.5], values[::-1]):
        with pytest.raises(DatasetChangedError) as caught:
            changed_loader(other).load_state_dict(state)
        assert "allow_changed=True" in caught.value.hint
        allowed = changed_loader(other, allow_changed=True)
        allowed.load_state_dict(state)
        assert allowed.position == 2


def test_a_shorter_data_set_with_override_goes_on_with_the_next_epoch() -> None:
    source = changed_loader([0.0] * 8)
    source.advance(3)
    allowed = changed_loader([0.0] * 4, allow_changed=True)
    allowed.load_state_dict(source.state_dict())
    assert (allowed.epoch, allowed.position) == (1, 0)


def test_a_fingerprint_of_the_user_replaces_reading() -> None:
    dataset = Noisy(8)
    state = bound(dataset, batch_size=2, fingerprint="v1").state_dict()
    bound(dataset, batch_size=2, fingerprint="v1").load_state_dict(state)
    assert dataset.num_reads == 0
    with pytest.raises(DatasetChangedError, match="v2"):
        bound(dataset, batch_size=2, fingerprint="v2").load_state_dict(state)
    with pytest.raises(DatasetChangedError):
        bound(dataset, batch_size=2).load_state_dict(state)


def test_samples_that_differ_each_time_are_not_called_changed() -> None:
    class Unstable(Noisy):
        def __getitem__(self, index: int) -> Any:
            self.num_reads += 1
            return self.num_reads

    state = bound(Unstable(8), batch_size=2).state_dict()
    assert state["fingerprint"] == "unstable"
    loader = bound(Unstable(8), batch_size=2)
    with pytest.warns(RuntimeWarning, match="pass fingerprint="):
        loader.load_state_dict(state)
    loader.load_state_dict(bound(Unstable(8), batch_size=2, fingerprint="v1").state_dict() | {"fingerprint": None})
    with pytest.raises(DatasetChangedError, match="samples 8, now it is 9"):
        bound(Unstable(9), batch_size=2).load_state_dict(state)


def test_another_order_is_refused() -> None:
    state = bound(range(8), batch_size=2, shuffle=True, weights=None).state_dict()
    for options in ({}, {"weights": [1.0] * 8}, {"sampler": range(8)}):
        with pytest.raises(DatasetChangedError, match="order"):
            bound(range(8), batch_size=2, **options).load_state_dict(state)
    with pytest.raises(DatasetChangedError, match="seed"):
        loader = DataLoader(range(8), batch_size=2, shuffle=True, seed=99)
        loader.load_state_dict(state)
    weighted = bound(range(3), batch_size=1, weights=[1, 2, 3]).state_dict()
    with pytest.raises(DatasetChangedError, match="hash"):
        bound(range(3), batch_size=1, weights=[1, 2, 4]).load_state_dict(weighted)
    sampled = bound(range(3), batch_size=1, sampler=[2, 1, 0]).state_dict()
    with pytest.raises(DatasetChangedError, match="hash"):
        bound(range(3), batch_size=1, sampler=[0, 1, 2]).load_state_dict(sampled)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"epoch": -1}, {"position": "4"}, {"seed": None}, {"sampler": 3}, {"position": -4}],
)
def test_a_malformed_state_is_refused(change: dict[str, Any]) -> None:
    state = bound(range(8), batch_size=2).state_dict() | change
    with pytest.raises(DataError):
        bound(range(8), batch_size=2).load_state_dict(state)


def test_resizing_needs_a_global_batch() -> None:
    state = bound(range(16), batch_size=2).state_dict()
    with pytest.raises(IndivisibleBatchError) as caught:
        bound(range(16), 0, 2, batch_size=2).load_state_dict(state)
    assert "global_batch_size=2" in caught.value.hint
    with pytest.raises(IndivisibleBatchError, match="3 rank"):
        bound(range(64), 0, 3, global_batch_size=16, micro_batch_size=4)
    assert bound(range(64), global_batch_size=16, micro_batch_size=4).fitting_world_sizes == [1, 2, 4]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "IterableDataset"),
        (iter([1]), {}, "not a map-style data set"),
        (range(8), {"batch_size": 0}, "positive integer"),
        (range(8), {"batch_size": 2.0}, "positive integer"),
        (range(8), {"batch_size": 2, "global_batch_size": 4}, "excludes"),
        (range(8), {"micro_batch_size": 2}, "needs global_batch_size"),
        (range(8), {"shuffle": True, "sampler": [1]}, "shuffle and sampler exclude"),
        (range(8), {"shuffle": True, "weights": [1] * 8}, "shuffle and weights exclude"),
        (range(8), {"tail": "keep"}, "tail='keep'"),
        (range(8), {"ack": "never"}, "ack='never'"),
        (range(8), {"num_samples": 4}, "num_samples"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        DataLoader(dataset, **options)
    assert caught.value.hint


def test_bad_places_and_ranks_are_refused() -> None:
    loader = DataLoader(range(8), batch_size=2)
    with pytest.raises(BadInputError, match="rank 2"):
        loader.bind(rank=2, world_size=2, seed=0)
    with pytest.raises(DataError, match="beyond epoch 0"):
        loader.position = 9
    with pytest.raises(DataError, match="not a place"):
        loader.seek(-1, 0)
    with pytest.raises(DataError, match="2 weights for 8"):
        bound(range(8), weights=[1, 2])


def test_alone_it_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OVERNIGHT_SEED", "9")
    loader = DataLoader(range(8), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
    assert (loader.rank, loader.world_size) == (1, 2)
    assert loader.seed == rng.derive(9, "loader", "main")

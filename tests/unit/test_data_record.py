"""The sample record: what was really consumed, however the processes ended, counted along the lineage."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.errors import DataError
from overnight.trainer.data.audit import Fork, lineage, read_forks
from overnight.trainer.data.entries import pack, read_record, unpack
from overnight.trainer.data.frames import FrameWriter, read_frames
from overnight.trainer.data.loader import DataLoader, MicroBatch
from overnight.trainer.data.record import Audit, SampleRecord, audit

LENGTH, GLOBAL_BATCH, EPOCHS = 50, 12, 3
UPDATES_PER_EPOCH, SAMPLES_PER_EPOCH = 4, 48


def make_loader(rank: int = 0, world_size: int = 1, **options: Any) -> DataLoader:
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, "shuffle": True}
    loader = DataLoader(range(LENGTH), **(sizes | options))
    loader.bind(rank=rank, world_size=world_size, seed=1)
    return loader


def run_attempt(
    trial: Path, attempt: int, start: int, stop: int, *, world_size: int = 1, generation: int = 1, lose: int = 0,
    parent: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """Trains the updates start .. stop-1 as one attempt; the last ``lose`` of them are never flushed."""
    claim(trial, attempt, generation, start, parent)
    for rank in range(world_size):
        loader = make_loader(rank, world_size, **options)
        folder = trial / "attempts" / f"{attempt:04d}"
        record = SampleRecord(folder, rank=rank, world_size=world_size, attempt=attempt, generation=generation)
        record.declare(epochs=EPOCHS, samples_per_epoch=loader.samples_per_epoch, repeats=loader.repeats)
        loader.advance(start)
        for step in range(start, stop):
            if step == stop - lose:
                record.flush()
            for batch in loader.micro_batches(loader.epoch, loader.position):
                record.append(step, batch)
                if batch.last_of_update:
                    break
            loader.advance()
        if not lose:
            record.close()


def claim(trial: Path, attempt: int, generation: int, step: int, parent: str | None) -> None:
    place = trial / "checkpoints"
    place.mkdir(exist_ok=True)
    body = {"attempt": attempt, "generation": generation, "step": step, "parent": parent}
    (place / f"fence-{attempt}.{generation}.json").write_text(json.dumps(body))


WHOLE = Audit(expected=144, recorded=144, repeated=0, skipped=0, updates=12)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_attempt_records_everything_once(tmp_path: Path, world_size: int) -> None:
    run_attempt(tmp_path, 1, 0, 12, world_size=world_size)
    assert audit(tmp_path) == WHOLE


def test_the_record_holds_the_indices_that_came_out(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 5, world_size=2)
    record = read_record(tmp_path / "attempts/0001/samples/rank-1.1.bin")
    expected = list(make_loader(1, 2).micro_batches(0, 0))
    assert [entry.indices.tolist() for entry in record.entries[: len(expected)]] == [
        batch.indices.tolist() for batch in expected
    ]
    assert [entry.step for entry in record.entries] == [step for step in range(5) for _ in range(3)]
    assert record.entries[1].positions.tolist() == [expected[1].first, expected[1].first + 1]
    assert record.tokens == [(1, 1)]


def test_work_beyond_a_fork_does_not_count(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 7)
    run_attempt(tmp_path, 2, 4, 9, world_size=2, parent="step-4.attempt-1.1")
    run_attempt(tmp_path, 3, 9, 12, world_size=3, parent="step-9.attempt-2.1")
    assert audit(tmp_path) == WHOLE


def test_a_branch_that_never_committed_is_left_out(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 9)
    run_attempt(tmp_path, 2, 5, 8, parent="step-5.attempt-1.1")
    run_attempt(tmp_path, 3, 8, 12, parent="step-8.attempt-1.1")
    assert audit(tmp_path) == WHOLE


def test_a_start_from_nothing_forgets_what_was_before(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 9)
    run_attempt(tmp_path, 2, 0, 12)
    assert audit(tmp_path) == WHOLE


def test_a_start_that_was_cut_off_may_go_on_writing(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 6)
    zombie = SampleRecord(tmp_path / "attempts/0001", rank=0, world_size=1, attempt=1)
    run_attempt(tmp_path, 1, 4, 12, generation=2, parent="step-4.attempt-1.1")
    for step, batch in enumerate(make_loader().micro_batches(0, 0)):
        zombie.append(6 + step, batch)
    zombie.close()
    assert audit(tmp_path) == WHOLE


def test_what_was_lost_after_the_last_commit_is_done_again(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 7, lose=3)
    run_attempt(tmp_path, 2, 4, 12, parent="step-4.attempt-1.1")
    assert audit(tmp_path) == WHOLE


def test_a_repeat_is_seen(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 7)
    run_attempt(tmp_path, 2, 4, 12, parent="step-7.attempt-1.1")
    assert audit(tmp_path) == Audit(expected=144, recorded=180, repeated=36, skipped=0, updates=12)


def test_a_gap_is_seen(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 3)
    run_attempt(tmp_path, 2, 4, 12, parent="step-4.attempt-1.1")
    assert audit(tmp_path) == Audit(expected=144, recorded=132, repeated=0, skipped=12, updates=11)


def test_a_missing_end_is_seen_only_in_a_finished_trial(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 10)
    assert audit(tmp_path).skipped == 24
    assert audit(tmp_path, finished=False) == Audit(expected=120, recorded=120, repeated=0, skipped=0, updates=10)


def test_a_missing_rank_is_seen(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 12, world_size=2)
    (tmp_path / "attempts/0001/samples/rank-1.1.bin").unlink()
    assert audit(tmp_path).skipped == 72


def left_early(trial: Path, *, lose: int = 0) -> SampleRecord:
    """Two updates of 4 of epoch 0, then a break, then all of epoch 1; the update ``lose`` (from 1) is not recorded."""
    claim(trial, 1, 1, 0, None)
    record = SampleRecord(trial / "attempts/0001", rank=0, world_size=1, attempt=1)
    record.declare(epochs=5, samples_per_epoch=12)
    updates = [(0, 0), (0, 4), (1, 0), (1, 4), (1, 8)]
    for step, (epoch, first) in enumerate(updates):
        if step == 2:
            record.leave(2, 0, 8)
            record.declare(epochs=2, samples_per_epoch=12)
        if step + 1 != lose:
            record.append(step, micro_batch(list(range(first, first + 4)), first, epoch))
    return record


@pytest.mark.parametrize("lose", range(6))
def test_what_a_break_left_is_not_missed_but_a_loss_beside_it_is(tmp_path: Path, lose: int) -> None:
    left_early(tmp_path, lose=lose).close()
    lost = 4 if lose else 0
    expected = Audit(expected=20, recorded=20 - lost, repeated=0, skipped=lost, updates=5 - bool(lose))
    assert audit(tmp_path) == expected


def test_a_break_that_a_later_attempt_did_not_repeat_excuses_nothing(tmp_path: Path) -> None:
    left_early(tmp_path).close()
    claim(tmp_path, 2, 1, 1, "step-1.attempt-1.1.again-2")
    record = SampleRecord(tmp_path / "attempts/0002", rank=0, world_size=1, attempt=2)
    record.declare(epochs=1, samples_per_epoch=12)
    record.append(1, micro_batch(list(range(4, 8)), 4))
    record.flush()
    assert audit(tmp_path).skipped == 4, "the break at step 2 lies beyond the fork at step 1"
    record.leave(2, 0, 8)
    record.close()
    claim(tmp_path, 3, 1, 2, "step-2.attempt-2.1")
    record = SampleRecord(tmp_path / "attempts/0003", rank=0, world_size=1, attempt=3)
    record.declare(epochs=2, samples_per_epoch=12)
    record.append(2, micro_batch([8, 9], 8))
    record.append(3, micro_batch(list(range(12)), 0, 1))
    record.close()
    assert audit(tmp_path) == Audit(expected=24, recorded=22, repeated=0, skipped=2, updates=4)


def test_a_place_with_checkpoints_saved_again_has_one_lineage(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 7)
    run_attempt(tmp_path, 2, 4, 12, parent="step-4.attempt-1.1.again-3")
    assert audit(tmp_path) == WHOLE


def test_wrong_indices_at_right_positions_are_seen(tmp_path: Path) -> None:
    record = SampleRecord(tmp_path / "attempts/0001", rank=0, world_size=1, attempt=1)
    record.declare(epochs=1, samples_per_epoch=4)
    for step, indices in enumerate(([0, 1], [1, 2])):
        record.append(step, micro_batch(indices, first=2 * step))
    record.close()
    assert audit(tmp_path) == Audit(expected=4, recorded=4, repeated=1, skipped=1, updates=2)


def micro_batch(indices: list[int], first: int = 0, epoch: int = 0) -> MicroBatch:
    end = first + len(indices)
    return MicroBatch(None, np.array(indices, dtype=np.int64), epoch, first, end, first, 1, 0, True, None)


def test_draws_with_replacement_are_not_repeats(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 12, shuffle=False, weights=[1.0] + [0.01] * (LENGTH - 1))
    assert audit(tmp_path) == WHOLE


def test_padding_is_not_recorded(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 15, world_size=2, tail="pad")
    assert audit(tmp_path) == Audit(expected=150, recorded=150, repeated=0, skipped=0, updates=15)


def test_loaders_are_counted_apart(tmp_path: Path) -> None:
    record = SampleRecord(tmp_path / "attempts/0001", rank=0, world_size=1, attempt=1)
    record.declare("main", epochs=1, samples_per_epoch=2)
    record.append(0, micro_batch([0, 1]))
    record.append(0, micro_batch([0, 1, 2]), name="other")
    record.close()
    assert audit(tmp_path) == Audit(expected=5, recorded=5, repeated=0, skipped=0, updates=1)


def test_a_trial_without_a_record_expects_nothing(tmp_path: Path) -> None:
    assert audit(tmp_path) == Audit(0, 0, 0, 0, 0)


def test_a_declared_trial_that_trained_nothing_skipped_everything(tmp_path: Path) -> None:
    run_attempt(tmp_path, 1, 0, 0)
    assert audit(tmp_path) == Audit(expected=144, recorded=0, repeated=0, skipped=144, updates=0)


@given(st.lists(st.binary(max_size=40), max_size=12), st.data())
@settings(deadline=None)
def test_a_file_cut_anywhere_keeps_its_whole_frames_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("frames") / "file"
    writer = FrameWriter(path)
    for payload in payloads:
        writer.append(payload)
    writer.close()
    cut = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, cut)
    whole = list(read_frames(path))
    assert whole == payloads[: len(whole)]
    assert sum(8 + len(payload) for payload in payloads[: len(whole) + 1]) > cut or len(whole) == len(payloads)
    again = FrameWriter(path)
    again.append(b"more")
    again.close()
    assert list(read_frames(path)) == [*whole, b"more"]


def test_a_flipped_byte_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = FrameWriter(path)
    for number in range(3):
        writer.append(f"frame {number}".encode())
    writer.close()
    content = bytearray(path.read_bytes())
    content[24] ^= 1
    path.write_bytes(content)
    assert list(read_frames(path)) == [b"frame 0"]


def test_only_flushed_entries_outlive_the_process(tmp_path: Path) -> None:
    record = SampleRecord(tmp_path, rank=0, world_size=1, attempt=1)
    record.append(0, micro_batch([3, 1]))
    assert not read_record(record.path).entries
    record.flush()
    assert [entry.indices.tolist() for entry in read_record(record.path).entries] == [[3, 1]]
    for step in range(1, 4000):
        record.append(step, micro_batch([3, 1]))
    assert len(read_record(record.path).entries) > 1000


def test_a_full_disk_is_an_error_with_a_way_out_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SampleRecord(tmp_path, rank=0, world_size=1, attempt=1)
    record.append(0, micro_batch([3, 1]))
    real_write = os.write

    def write_a_little(fd: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return real_write(fd, bytes(data[:10]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_little)
        with pytest.raises(DataError, match="cannot be written: No space left") as caught:
            record.flush()
    assert "Free space" in caught.value.hint
    record.close()
    assert [entry.indices.tolist() for entry in read_record(record.path).entries] == [[3, 1]]


def test_a_place_that_cannot_hold_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    with pytest.raises(DataError, match=r"rank-0\.1\.bin cannot be written"):
        SampleRecord(tmp_path, rank=0, world_size=1, attempt=1)


INDICES = st.one_of(
    st.lists(st.integers(0, 2**40), max_size=30),
    st.lists(st.integers(0, 255), max_size=30),
    st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 2**40), st.integers(0, 30)),
)


@given(INDICES)
def test_indices_survive_packing(indices: list[int]) -> None:
    width, data = pack(np.array(indices, dtype=np.int64))
    assert unpack(data, len(indices), width).tolist() == indices
    if len(indices) > 1 and indices == list(range(indices[0], indices[0] + len(indices))):
        assert len(data) == 8


def test_a_record_stays_small(tmp_path: Path) -> None:
    for shuffle, limit in ((True, 2 * 60_000), (False, 0)):
        loader = DataLoader(range(60_000), batch_size=256, shuffle=shuffle)
        record = SampleRecord(tmp_path / str(shuffle), rank=0, world_size=1, attempt=1)
        for step, batch in enumerate(loader.micro_batches(0, 0)):
            record.append(step, batch)
        record.close()
        assert record.path.stat().st_size < limit + 60 * 235


def test_lineage_follows_parents_and_survives_damaged_fences(tmp_path: Path) -> None:
    inf = float("inf")
    forks = {(1, 1): Fork(0, None), (2, 1): Fork(5, (1, 1)), (3, 1): Fork(8, (1, 1))}
    assert lineage(forks, {(1, 1), (2, 1)}) == {(3, 1): inf, (1, 1): 8}
    assert lineage({}, set()) == {}
    assert lineage({}, {(1, 1), (2, 1)}) == {(2, 1): inf}
    assert lineage({(2, 1): Fork(4, None)}, {(1, 1)}) == {(2, 1): inf, (1, 1): 4}
    deep = {(2, 1): Fork(6, (1, 1)), (3, 1): Fork(4, (2, 1))}
    assert lineage(deep, {(1, 1)}) == {(3, 1): inf, (2, 1): 4, (1, 1): 4}

    (tmp_path / "fence-1.1.json").write_text("{")
    (tmp_path / "fence-x.json").write_text("{}")
    (tmp_path / "fence-2.1.json").write_text("[]")
    claim_text = {"attempt": 3, "generation": 1, "step": 7, "parent": "step-7.attempt-1.2.again-2"}
    (tmp_path / "fence-3.1.json").write_text(json.dumps(claim_text))
    assert read_forks(tmp_path) == {(3, 1): Fork(7, (1, 2))}

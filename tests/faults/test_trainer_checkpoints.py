"""Every fault of a checkpoint is named, and costs at most the work since the one before."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_lab import Copy

from overnight.core.errors import (
    CorruptCheckpointError,
    FencedError,
    NotFoundError,
    NoUsableCheckpointError,
    SaveFailedError,
)
from overnight.trainer.checkpoint.fence import claim, next_attempt
from overnight.trainer.checkpoint.manifest import MANIFEST, verify
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reader import Restored, inspect, lineage, newest_good
from overnight.trainer.checkpoint.retention import Retention, prune
from overnight.trainer.checkpoint.writing.channel import Pulse
from overnight.trainer.checkpoint.writing.destination import LocalDestination
from overnight.trainer.checkpoint.writing.order import Author, Piece, SaveOrder
from overnight.trainer.checkpoint.writing.save import History, Save


def save(
    place: LocalPlace,
    step: int,
    token: Token = Token(1),
    parent: CheckpointName | None = None,
    *,
    save: int = 1,
    rank: int = 0,
    world_size: int = 1,
    state: Any = None,
    timeout_seconds: float = 10.0,
    before_publish: Callable[[], None] = lambda: None,
) -> CheckpointName:
    author = Author(token=token, parent=parent, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)
    state = {"w": torch.full((8,), float(step)), "n": step} if state is None else state
    copy = Copy({"it": state, "big": torch.arange(1000.0)})
    name = CheckpointName(step, token, save)
    pieces, memory = [], bytearray()
    for key, tensor in copy.tensors.items():
        content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        pieces.append(Piece(key, str(tensor.dtype)[6:], tuple(tensor.shape), len(memory), len(content)))
        memory += content
    order = SaveOrder(1, step, save, json.dumps(copy.objects), {}, tuple(pieces))
    pulse = Pulse.make()
    destination = LocalDestination(place, rank)
    try:
        Save(order, memoryview(memory), author, destination, History(), pulse, lambda _: before_publish()).run()
    finally:
        pulse.close()
    return name


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


@pytest.fixture
def two(place: LocalPlace) -> LocalPlace:
    """A place with steps 10 and 20 of token 1.1."""
    claim(place, Token(1), None)
    save(place, 10)
    save(place, 20)
    return place


def content(place: LocalPlace, name: CheckpointName) -> Any:
    return Restored(place.path(name), verify(place.path(name)), 0).state("it")


def step_of(found: Any) -> int:
    assert found is not None
    name, manifest = found
    assert name.step == manifest.step
    return int(manifest.step)


def files_of_a_checkpoint() -> list[str]:
    return ["__0_0.distcp", ".metadata", "index.json", "state-0.json", MANIFEST]


def test_a_checkpoint_consists_of_what_this_file_tests(two: LocalPlace) -> None:
    assert sorted(p.name for p in (two.root / "step-20.attempt-1.1").iterdir()) == sorted(files_of_a_checkpoint())


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_empty, Path.unlink])
@pytest.mark.parametrize("file", files_of_a_checkpoint())
def test_damage_to_any_file_is_named_and_the_one_before_is_used(
    two: LocalPlace, file: str, damage: Callable[[Path], None]
) -> None:
    """C3."""
    damage(two.root / "step-20.attempt-1.1" / file)
    said: list[str] = []
    assert step_of(newest_good(two, said.append)) == 10
    assert len(said) == 1 and "step-20.attempt-1.1" in said[0] and file in said[0]


def test_every_single_flipped_bit_of_a_manifest_is_noticed(two: LocalPlace) -> None:
    path = two.root / "step-20.attempt-1.1" / MANIFEST
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(bytes(flipped))
        try:
            same = json.loads(flipped) == json.loads(whole)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(CorruptCheckpointError):
                verify(path.parent)


def test_a_renamed_checkpoint_is_not_believed(two: LocalPlace) -> None:
    (two.root / "step-20.attempt-1.1").rename(two.root / "step-30.attempt-1.1")
    assert step_of(newest_good(two, lambda _: None)) == 10


def test_nothing_usable_is_loud_and_lists_the_reasons(two: LocalPlace) -> None:
    """C4."""
    for name in two.checkpoints():
        damage_flip(two.path(name) / "__0_0.distcp")
    with pytest.raises(NoUsableCheckpointError, match=r"step-20.*does not match its hash.*step-10"):
        newest_good(two, lambda _: None)


def test_what_comes_and_goes_during_the_search_is_seen(two: LocalPlace) -> None:
    """A start that was cut off, and has no successor yet, saves and tidies while the next one reads."""
    ten, twenty = two.checkpoints()
    damage_flip(two.path(twenty) / "__0_0.distcp")

    def go_on(_: str) -> None:
        save(two, 30)
        two.remove(str(ten))

    assert step_of(newest_good(two, go_on)) == 30


def test_foreign_files_are_loud(place: LocalPlace) -> None:
    """C4."""
    place.root.mkdir()
    (place.root / "model.pt").write_bytes(b"weights")
    with pytest.raises(NoUsableCheckpointError, match=r"model\.pt"):
        newest_good(place)


def test_names_of_foreign_files_reach_the_terminal_harmlessly(
    two: LocalPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    """T1."""
    (two.root / "\x1b[31mred\x07").touch()
    assert step_of(newest_good(two)) == 20
    said = capsys.readouterr().err
    assert "holds other files too" in said and "red" in said and "\x1b" not in said and "\x07" not in said


def test_a_kill_in_the_first_save_is_a_fresh_start(place: LocalPlace) -> None:
    claim(place, Token(1), None)
    (place.partial(CheckpointName(5, Token(1)))).mkdir()
    assert newest_good(place) is None
    assert newest_good(place.root / "nowhere") is None
    with pytest.raises(NotFoundError):
        inspect(place.root)


class Disk:
    """Lets writes fail after a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int, after: int) -> None:
        self.left = after
        real = os.fsync

        def failing(descriptor: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(error, os.strerror(error))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_full_disk_publishes_nothing_and_leaves_the_rest_usable(
    two: LocalPlace, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    """C1."""
    Disk(monkeypatch, error, after)
    with pytest.raises(SaveFailedError, match="checkpoint step-30") as caught:
        save(two, 30)
    assert os.strerror(error) in str(caught.value)
    monkeypatch.undo()
    assert step_of(newest_good(two)) == 20
    save(two, 30, save=2)
    assert step_of(newest_good(two)) == 30


def test_a_disk_that_fills_up_for_real(tmp_path: Path) -> None:
    """C1 with the kernel's own ENOSPC."""
    place = LocalPlace(tmp_path)
    claim(place, Token(1), None)
    save(place, 10)
    folder = place.partial(CheckpointName(20, Token(1)))
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(SaveFailedError, match="step-20"):
        save(place, 20)
    assert step_of(newest_good(place)) == 10


def test_a_higher_fence_refuses_before_and_during_a_save(two: LocalPlace) -> None:
    parent = two.checkpoints()[-1]
    with pytest.raises(FencedError, match="attempt 2, generation 1 owns"):
        save(two, 30, before_publish=lambda: claim(two, Token(2), parent) and None)
    assert [n.step for n in two.checkpoints()] == [10, 20]
    with pytest.raises(FencedError):
        save(two, 40)
    with pytest.raises(FencedError):
        claim(two, Token(1, 2), parent)
    with pytest.raises(FencedError, match="already been started"):
        claim(two, Token(2), parent)
    save(two, 25, Token(2), parent)
    assert step_of(newest_good(two)) == 25


def test_racing_claims_of_one_token_have_one_winner(place: LocalPlace) -> None:
    results: list[str] = []
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        try:
            claim(place, Token(1), None)
            results.append("won")
        except FencedError:
            results.append("lost")

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["lost"] * 7 + ["won"]


def names(place: LocalPlace) -> list[str]:
    return [str(name) for name in lineage(place)]


def test_a_commit_hides_what_its_parent_did_beyond_the_fork(two: LocalPlace) -> None:
    ten = two.checkpoints()[0]
    claim(two, Token(2), ten)
    assert names(two) == ["step-20.attempt-1.1", "step-10.attempt-1.1"], "nothing committed: the parent still counts"
    save(two, 12, Token(2), ten)
    assert names(two) == ["step-12.attempt-2.1", "step-10.attempt-1.1"]
    damage_flip(two.root / "step-12.attempt-2.1" / "__0_0.distcp")
    assert step_of(newest_good(two, lambda _: None)) == 10
    assert next_attempt(two) == 3


def test_a_fresh_start_hides_everything_before_it(two: LocalPlace) -> None:
    claim(two, Token(2), None, fresh=True)
    assert names(two) == []
    assert newest_good(two) is None
    save(two, 3, Token(2))
    assert names(two) == ["step-3.attempt-2.1"]


def test_a_damaged_fence_costs_the_fork_point_not_the_checkpoints(two: LocalPlace) -> None:
    claim(two, Token(2), two.checkpoints()[0])
    save(two, 12, Token(2))
    two.fence_path(Token(2)).write_text("{torn")
    assert names(two) == ["step-12.attempt-2.1", "step-20.attempt-1.1", "step-10.attempt-1.1"]
    two.fence_path(Token(2)).unlink()
    assert names(two) == ["step-12.attempt-2.1", "step-20.attempt-1.1", "step-10.attempt-1.1"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_whatever_was_started_and_saved_the_newest_lineage_wins(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int, bool]]
) -> None:
    """A model: each start forks from what the reader gives and saves some steps; the last of them must come back."""
    place = LocalPlace(tmp_path_factory.mktemp("place"))
    expected: tuple[int, int] | None = None
    for number, (saves, gap, stale) in enumerate(starts, 1):
        best = next(lineage(place), None)
        assert (None if best is None else (best.token.attempt, best.step)) == expected
        token = Token(number)
        claim(place, token, best)
        if stale and number > 1 and saves:
            # a partitioned writer of the start before publishes in the moment before our first commit
            place.path(CheckpointName(1000 + number, Token(number - 1))).mkdir()
        step = best.step if best else 0
        for _ in range(saves):
            step += gap + 1
            place.path(CheckpointName(step, token)).mkdir()
            expected = (number, step)


def test_retention_keeps_the_newest_of_its_own_token_only(two: LocalPlace) -> None:
    parent = two.checkpoints()[-1]
    claim(two, Token(2), parent)
    (two.partial(CheckpointName(15, Token(2)))).mkdir()
    (two.partial(CheckpointName(15, Token(1)))).mkdir()
    for step in (30, 40, 50):
        newest = save(two, step, Token(2), parent)
        prune(two, newest, Retention(keep=2))
    assert names(two) == ["step-50.attempt-2.1", "step-40.attempt-2.1", "step-20.attempt-1.1", "step-10.attempt-1.1"]
    left = [entry for entry in two.entries() if entry.endswith(".partial") or entry.startswith(".")]
    assert left == ["step-15.attempt-1.1.partial"]
    prune(two, newest, Retention(keep=1))
    assert names(two)[0] == "step-50.attempt-2.1", "the last good one stays whatever is asked"


def gang(place: LocalPlace, step: int, states: list[Any], **kwargs: Any) -> list[Exception | None]:
    """Saves with one thread per rank, which share nothing but the folder; returns each rank's error."""
    errors: list[Exception | None] = [None] * len(states)

    def one(rank: int) -> None:
        try:
            if isinstance(states[rank], Exception):
                raise states[rank]
            save(place, step, rank=rank, world_size=len(states), state=states[rank], **kwargs)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return errors


def test_ranks_store_once_what_is_equal_and_each_what_is_not(place: LocalPlace) -> None:
    claim(place, Token(1), None)
    states = [{"same": torch.ones(50), "own": torch.full((3,), float(rank)), "n": rank} for rank in range(3)]
    assert gang(place, 5, states) == [None] * 3
    found = newest_good(place)
    assert found is not None
    folder = place.path(found[0])
    for rank in range(3):
        state = Restored(folder, found[1], rank).state("it")
        assert torch.equal(state["same"], torch.ones(50)) and state["n"] == rank
        assert torch.equal(state["own"], torch.full((3,), float(rank)))
    assert Restored(folder, found[1], 7).state("it")["n"] == 0
    stored = inspect(folder)["tensors"]
    assert sorted(key for key in stored if "own" in key) == ["rank-0/it.own", "rank-1/it.own", "rank-2/it.own"]
    assert [key for key in stored if "same" in key] == ["it.same"]


def test_more_ranks_than_tensors(place: LocalPlace) -> None:
    claim(place, Token(1), None)
    assert gang(place, 5, [{"n": 1}] * 5) == [None] * 5
    assert step_of(newest_good(place)) == 5


def test_a_rank_that_fails_is_seen_by_all(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8."""
    claim(place, Token(1), None)
    real = LocalDestination.folder

    def failing(self: LocalDestination, name: CheckpointName) -> Path:
        if self.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(name))
        return real(self, name)

    monkeypatch.setattr(LocalDestination, "folder", failing)
    errors = gang(place, 5, [{"n": 1}] * 3)
    assert all(isinstance(error, SaveFailedError) and "rank 1" in str(error) for error in errors), errors
    assert newest_good(place) is None


def test_a_rank_that_is_gone_costs_a_time_out_not_a_hang(place: LocalPlace) -> None:
    """C8."""
    claim(place, Token(1), None)
    errors = gang(place, 5, [{"n": 1}, RuntimeError("killed"), {"n": 1}], timeout_seconds=0.3)
    assert "killed" in str(errors[1])
    assert isinstance(errors[0], SaveFailedError) and isinstance(errors[2], SaveFailedError)
    assert newest_good(place) is None


def test_inspect_tells_what_is_wrong(two: LocalPlace) -> None:
    facts = inspect(two.root)
    assert (facts["step"], facts["good"], facts["world_size"], facts["parent"]) == (20, True, 1, None)
    assert facts["tensors"]["it.w"] == "float32[8]"
    damage_flip(two.root / "step-20.attempt-1.1" / "__0_0.distcp")
    facts = inspect(two.root / "step-20.attempt-1.1")
    assert facts["good"] is False and "__0_0.distcp" in facts["problem"]


def test_content_survives_its_copy_elsewhere(two: LocalPlace, tmp_path: Path) -> None:
    moved = LocalPlace(tmp_path / "moved")
    shutil.copytree(two.root, moved.root)
    shutil.rmtree(two.root)
    found = newest_good(moved)
    assert found is not None
    assert content(moved, found[0])["n"] == 20

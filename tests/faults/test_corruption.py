"""Damage to any byte of any file is noticed and named, and the checkpoint before is used; nothing is half restored."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_lab import lay
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.errors import CorruptCheckpointError, NoUsableCheckpointError
from overnight.trainer.checkpoint.fence import claim, read_fences
from overnight.trainer.checkpoint.manifest import MANIFEST, read_manifest
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reading.finding import newest_good, open_newest
from overnight.trainer.checkpoint.reading.inspection import inspect
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import mark

OLD, NEW = CheckpointName(10, Token(1)), CheckpointName(20, Token(1))
FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", MANIFEST]
FILES += [f"{kind}-{rank}.json" for kind in ("state", "rank") for rank in (0, 1)]


def states(step: int) -> list[dict[str, dict[str, object]]]:
    """Two ranks; one tensor with segments of its own, small ones that share one, and one of a rank's own."""
    big = torch.arange((1 << 18) + step, dtype=torch.float32)
    return [
        {
            "model": {"big": big, "small": torch.full((33,), float(step)), "own": torch.tensor([rank])},
            "n": {"step": step},
        }
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> LocalPlace:
    place = LocalPlace(tmp_path_factory.mktemp("pristine") / "ü")
    for name in (OLD, NEW):
        lay(place, name.step, states(name.step), private=["model.own"])
    return place


@pytest.fixture
def place(pristine: LocalPlace, tmp_path: Path) -> LocalPlace:
    return LocalPlace(Path(shutil.copytree(pristine.root, tmp_path / "place")))


def test_the_files_under_test_are_all_there_are(pristine: LocalPlace) -> None:
    assert sorted(path.name for path in pristine.path(NEW).iterdir()) == sorted(FILES)


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


@contextlib.contextmanager
def repaired(path: Path) -> Iterator[None]:
    whole = path.read_bytes()
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)


def assert_noticed(place: LocalPlace, file: str) -> None:
    """A start takes the old checkpoint, whole, and the complaint names checkpoint and file."""
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.name == OLD, f"damage to {file} was not noticed"
    assert restored.state("n") == {"step": 10} and restored.state("model")["small"][0] == 10
    assert len(said) == 1 and str(NEW) in said[0] and file in said[0], said


@pytest.mark.parametrize("file", FILES)
def test_each_region_flipped_in_turn(place: LocalPlace, file: str) -> None:
    """Head, tail and 40 places between them; in the data file among others zip headers, filling and the directory."""
    path = place.path(NEW) / file
    size = path.stat().st_size
    for position in sorted({0, size - 1, *range(0, size, max(1, size // 40))}):
        if file == MANIFEST and path.read_bytes()[position : position + 1].isspace():
            continue  # JSON does not mind what kind of white space it is
        with repaired(path):
            flip(path, position, position % 8)
            assert_noticed(place, file)


@pytest.mark.parametrize("file", FILES)
def test_each_length_and_a_file_that_is_gone(place: LocalPlace, file: str) -> None:
    path = place.path(NEW) / file
    size = path.stat().st_size
    for length in (size - 1, size // 2, 1, 0):
        with repaired(path):
            os.truncate(path, length)
            assert_noticed(place, file)
    with repaired(path):
        path.unlink()
        assert_noticed(place, file)


@pytest.mark.parametrize("file", [file for file in FILES if file != MANIFEST])
def test_a_file_that_grew(place: LocalPlace, file: str) -> None:
    path = place.path(NEW) / file
    path.write_bytes(path.read_bytes() + b"\0")
    assert_noticed(place, file)


@pytest.mark.parametrize("file", FILES)
def test_the_same_file_of_another_checkpoint(place: LocalPlace, file: str) -> None:
    """A restore from a backup that mixed two saves: every file is good in itself."""
    differs = (place.path(OLD) / file).read_bytes() != (place.path(NEW) / file).read_bytes()
    shutil.copy(place.path(OLD) / file, place.path(NEW) / file)
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.name == (OLD if differs else NEW)
    assert [file in line for line in said] == [True] * differs


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_something_else_under_its_name(place: LocalPlace, file: str, kind: str) -> None:
    """Nobody waits at a pipe."""
    path = place.path(NEW) / file
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[kind]()
    assert_noticed(place, file)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_any_bit(pristine: LocalPlace, file: str, data: st.DataObject) -> None:
    path = pristine.path(NEW) / file
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    if file == MANIFEST and _same_json(whole, position, bit):
        return
    with repaired(path):
        flip(path, position, bit)
        assert_noticed(pristine, file)


def _same_json(whole: bytes, position: int, bit: int) -> bool:
    changed = bytearray(whole)
    changed[position] ^= 1 << bit
    with contextlib.suppress(ValueError):
        return bool(json.loads(changed) == json.loads(whole))
    return False


def test_only_the_rank_that_looks_sees_the_damage_and_all_go_back(place: LocalPlace) -> None:
    """Each of two ranks reads its share; the damage is in what only rank 1 reads."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    from overnight.trainer.checkpoint.reading.finding import Reader

    index = json.loads((place.path(NEW) / "index.json").read_bytes())["tensors"]
    flip(place.path(NEW) / "__1_0.distcp", index["rank-1/model.own"]["chunks"][0]["offset"], 3)
    barrier, box = Barrier(2), [None, None]

    def gather(rank: int) -> Callable[[object], list[object]]:
        def exchange(value: object) -> list[object]:
            box[rank] = value  # type: ignore[call-overload]
            barrier.wait(20)
            found = list(box)
            barrier.wait(20)
            return found

        return exchange

    said: list[list[str]] = [[], []]

    def rank(number: int) -> Restored | None:
        return open_newest(place, Reader(number, 2, 2, gather(number)), said[number].append)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert [restored and restored.manifest.name for restored in found] == [OLD, OLD]
    assert len(said[0]) == 1 and "__1_0.distcp" in said[0][0] and not said[1]
    assert [restored.state("model")["own"].item() for restored in found if restored] == [0, 1]


def test_nothing_usable_is_loud(place: LocalPlace) -> None:
    for name in (OLD, NEW):
        flip(place.path(name) / "__0_0.distcp", 200_000, 0)
    for read in (newest_good, open_newest):
        with pytest.raises(NoUsableCheckpointError, match=r"step-20.*does not match its hash.*step-10"):
            read(place, complaints=lambda _: None)


def test_damage_after_the_start_does_not_reach_what_is_held(place: LocalPlace) -> None:
    restored = open_newest(place)
    assert restored is not None
    shutil.rmtree(place.path(NEW))
    assert restored.state("model")["small"][0] == 20


def test_damage_that_comes_later_is_noticed_when_read_again(place: LocalPlace) -> None:
    restored = open_newest(place)
    assert restored is not None
    restored.release()
    index = json.loads((place.path(NEW) / "index.json").read_bytes())["tensors"]
    flip(place.path(NEW) / "__0_0.distcp", index["model.big"]["chunks"][0]["offset"] + 77, 1)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp does not match"):
        restored.state("model")


def test_a_stale_attempt_is_named(place: LocalPlace) -> None:
    """Attempt 1 was cut off at step 10, went on unseen to 20 and came back; attempt 2 had gone on from 10."""
    lay(place, 15, states(15), Token(2), parent=OLD, private=["model.own"])
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.step == 15
    assert said == [f"passed over {NEW}: it is of a stale attempt: 2.1 went on from step 10"]
    found = newest_good(place, complaints=lambda _: None)
    assert found is not None and found[0].step == 15


@pytest.fixture
def other(tmp_path: Path) -> LocalPlace:
    """The checkpoints of another trial, which has come further."""
    other = LocalPlace(tmp_path / "other")
    for step, token in ((30, Token(1)), (40, Token(5))):
        lay(other, step, states(step), token, private=["model.own"])
    return other


def copy_checkpoints(source: LocalPlace, to: LocalPlace) -> list[CheckpointName]:
    for name in source.checkpoints():
        shutil.copytree(source.path(name), to.path(name))
    return source.checkpoints()


@pytest.mark.parametrize("read", [newest_good, open_newest])
def test_a_checkpoint_of_another_trial_is_named_and_passed_over(
    place: LocalPlace, other: LocalPlace, read: Callable[..., object]
) -> None:
    foreign = copy_checkpoints(other, place)
    said: list[str] = []
    found = read(place, complaints=said.append)
    manifest = found.manifest if isinstance(found, Restored) else found[1] if isinstance(found, tuple) else None
    assert manifest is not None and manifest.name == NEW
    reason = "it belongs to another trial's checkpoints"
    assert said == [f"passed over {name}: {reason}" for name in reversed(foreign)]
    assert inspect(place.path(foreign[-1]))["good"], "by itself it is as good as ever"


def test_only_checkpoints_of_another_trial_are_no_reason_to_start_anew(other: LocalPlace, tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "begun")
    claim(place, Token(1), None)
    copy_checkpoints(other, place)
    for read in (newest_good, open_newest):
        with pytest.raises(NoUsableCheckpointError, match=r"step-40.*another trial's.*step-30.*another trial's"):
            read(place, complaints=lambda _: None)


def test_fences_of_both_trials_do_not_make_foreign_checkpoints_ours(place: LocalPlace, other: LocalPlace) -> None:
    copy_checkpoints(other, place)
    shutil.copy(other.fence_path(Token(5)), place.fence_path(Token(7)))
    found = newest_good(place, complaints=lambda _: None)
    assert found is not None and found[0].token == Token(5), "fences of that place vouch for attempt 5"
    said: list[str] = []
    shutil.rmtree(place.path(found[0]))
    found = newest_good(place, complaints=said.append)
    assert found is not None and found[0] == NEW and any("step-30" in line for line in said)


def test_a_place_keeps_its_identity_where_it_goes_and_through_damage(place: LocalPlace, tmp_path: Path) -> None:
    (identity,) = {fence.place for fence in read_fences(place).values()}
    assert identity and read_manifest(place.path(NEW)).place == identity
    moved = LocalPlace(place.root.rename(tmp_path / "moved"))
    assert claim(moved, Token(2), NEW).place == identity
    moved.fence_path(Token(1)).write_bytes(b"")
    moved.fence_path(Token(2)).unlink()
    restored = open_newest(moved)
    assert restored is not None and restored.manifest.name == NEW
    assert claim(moved, Token(3), NEW, parent_place=restored.manifest.place).place == identity
    found = newest_good(moved)
    assert found is not None and found[0] == NEW


def test_checkpoints_and_fences_without_an_identity_are_taken(place: LocalPlace) -> None:
    """Older versions wrote neither."""
    fence = json.loads(place.fence_path(Token(1)).read_bytes())
    del fence["place"]
    place.fence_path(Token(1)).write_text(json.dumps(fence))
    assert open_newest(place) is not None
    bare = replace(read_manifest(place.path(NEW)), place="")
    (place.path(NEW) / MANIFEST).write_bytes(bare.to_bytes())
    claim(place, Token(2), NEW)
    found = newest_good(place)
    assert found is not None and found[0] == NEW


def test_foreign_checkpoints_neither_push_others_out_nor_are_deleted(place: LocalPlace, other: LocalPlace) -> None:
    foreign = copy_checkpoints(other, place)
    found = survey(place, keep=1)
    assert found.last_good() == NEW and found.line == (NEW, OLD)
    assert [deletion.entry for deletion in mark(found, at_rest=True)] == [str(OLD)]
    assert {row.name for row in found.rows if "another trial" in row.reason} == set(foreign)


def test_foreign_files_are_named_and_left_alone(place: LocalPlace) -> None:
    (place.root / "model.pt").write_bytes(b"weights")
    (place.path(NEW) / "__2_0.distcp").write_bytes(b"of an earlier save by more ranks")
    (place.path(NEW) / "rank-2.json").write_bytes(b"of a writer that was killed before it had tidied up")
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.name == NEW
    assert any("model.pt" in line for line in said) and any("__2_0.distcp" in line for line in said) and len(said) == 2
    assert not any("rank-2.json" in line for line in said)


def test_metadata_that_nobody_vouches_for_is_damage(place: LocalPlace) -> None:
    """Torch's own tools would read it."""
    manifest = read_manifest(place.path(NEW))
    del manifest.files[".metadata"]
    (place.path(NEW) / MANIFEST).write_bytes(manifest.to_bytes())
    assert_noticed(place, ".metadata")


def test_every_problem_is_listed(place: LocalPlace) -> None:
    flip(place.path(NEW) / "__0_0.distcp", 5, 0)
    (place.path(NEW) / "rank-1.json").unlink()
    facts = inspect(place.path(NEW))
    assert not facts["good"] and len(facts["problems"]) == 2 and facts["problem"] == facts["problems"][0]
    assert facts["objects"]["n"] == 0 and facts["objects"]["model"] > 1 << 20 and facts["world_size"] == 2
    assert inspect(place.path(OLD))["good"]
    assert inspect(place.root)["step"] == 10


def test_a_manifest_of_a_later_version_is_passed_over_not_misread(place: LocalPlace) -> None:
    path = place.path(NEW) / MANIFEST
    manifest = read_manifest(place.path(NEW))
    object.__setattr__(manifest, "format", 3)
    path.write_bytes(manifest.to_bytes())
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.name == OLD and "has format 3" in said[0]

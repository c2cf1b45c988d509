"""Damage to the small files of a place: one letter of a fence, and JSON that is nothing but brackets."""

import os
from pathlib import Path

import pytest
import torch
from checkpoint_lab import lay

from overnight.trainer.checkpoint.fence import claim, read_fences
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.reading.lineage import lineage
from overnight.trainer.checkpoint.survey import survey


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    """Attempt 2 went on from step 10 of attempt 1, which had come to 30, and has come to 20 itself."""
    place = LocalPlace(tmp_path / "checkpoints")
    claim(place, Token(1, 1), None)
    claim(place, Token(2, 1), CheckpointName(10, Token(1, 1)))
    for step, attempt in ((10, 1), (30, 1), (20, 2)):
        lay(place, step, [{"model": {"weight": torch.full((3,), float(step))}}], token=Token(attempt, 1))
    return place


def test_no_altered_letter_of_a_fence_moves_the_fork(place: LocalPlace) -> None:
    fence = place.root / "fence-2.1.json"
    good = fence.read_bytes()
    before = read_fences(place)[Token(2, 1)]
    for at in range(len(good)):
        for bit in (1, 2, 4, 16, 128):
            fence.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            found = read_fences(place)[Token(2, 1)]
            assert found == before or not found.readable, fence.read_bytes()
    fence.write_bytes(good)
    assert [name.step for name in lineage(place)] == [20, 10]


def test_an_altered_fence_costs_no_checkpoint(place: LocalPlace) -> None:
    fence = place.root / "fence-2.1.json"
    identity = read_fences(place)[Token(2, 1)].place.encode()
    other = identity[:-1] + (b"0" if identity[-1:] != b"0" else b"1")
    fence.write_bytes(fence.read_bytes().replace(identity, other))
    found = newest_good(place, lambda line: None)
    assert found is not None and found[0].step == 20


@pytest.mark.parametrize("file", ["manifest.json", "index.json", "state-0.json"])
def test_brackets_without_end_are_damage_like_any_other(place: LocalPlace, file: str) -> None:
    (place.root / "step-20.attempt-2.1" / file).write_text("[" * 100_000)
    assert survey(place).rows
    said: list[str] = []
    found = newest_good(place, said.append)
    assert found is not None and found[0].step == 10
    assert file in said[0]


def test_a_fence_of_brackets_is_an_unreadable_one(place: LocalPlace) -> None:
    (place.root / "fence-2.1.json").write_text("[" * 100_000)
    assert not read_fences(place)[Token(2, 1)].readable
    found = newest_good(place, lambda line: None)
    assert found is not None and found[0].step == 20


def test_no_altered_letter_of_a_manifest_is_taken_for_a_fact(place: LocalPlace) -> None:
    manifest = place.root / "step-20.attempt-2.1" / "manifest.json"
    good = manifest.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 200)):
        manifest.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        rows = {row.name.step: row.summary.readable for row in survey(LocalPlace(place.root)).rows}
        assert rows == {10: True, 30: True, 20: False}, manifest.read_bytes()


@pytest.mark.parametrize("file", ["step-20.attempt-2.1/manifest.json", "fence-2.1.json"])
def test_nobody_waits_for_a_pipe(place: LocalPlace, file: str) -> None:
    (place.root / file).unlink()
    os.mkfifo(place.root / file)
    rows = {row.name.step: row.summary.readable for row in survey(place).rows}
    assert rows[20] is (file != "step-20.attempt-2.1/manifest.json")
    found = newest_good(place, lambda line: None)
    assert found is not None and found[0].step == (20 if rows[20] else 10)

"""What the last bits depend on is recorded, and what differs at a resume is said in one line."""

import copy
import json
from typing import Any

import pytest
import torch

from overnight.trainer import rng
from overnight.trainer.envelope import differences, envelope, warning

CPU = torch.device("cpu")


def changed(part: str, name: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(envelope(CPU, 2))
    facts[part][name] = value
    return facts


def test_facts_are_json_and_repeatable() -> None:
    facts = envelope(CPU, 2)
    assert json.loads(json.dumps(facts)) == facts == envelope(CPU, 2)
    assert {"world size", "device", "device name", "hash seed", "deterministic algorithms"} <= set(facts["envelope"])
    assert {"python", "torch", "numpy", "overnight"} <= set(facts["versions"])
    assert warning(facts, envelope(CPU, 2)) is None


def test_asking_leaves_random_state_alone() -> None:
    with rng.isolated():
        torch.manual_seed(1)
        expected = torch.rand(2)
        torch.manual_seed(1)
        envelope(CPU, 1)
        assert torch.equal(torch.rand(2), expected)


def test_what_differs_is_named_with_before_and_after() -> None:
    saved = changed("versions", "torch", "2.0")
    saved["threads"] += 1
    saved["envelope"]["device name"] = "another"
    now = envelope(CPU, 2)
    found = differences(saved, now)
    assert found[0] == f"threads {now['threads'] + 1} -> {now['threads']}"
    assert f"torch 2.0 -> {torch.__version__}" in found and found[-1].startswith("device name another -> ")
    text = warning(saved, now)
    assert text is not None and "\n" not in text and all(one in text for one in found)
    assert "samples and their order stay exact" in text


def test_flags_that_a_script_sets_are_seen() -> None:
    before = envelope(CPU, 1)
    deterministic, flush = torch.are_deterministic_algorithms_enabled(), torch.set_flush_denormal(True)
    try:
        torch.use_deterministic_algorithms(True)
        found = differences(before, envelope(CPU, 1))
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_flush_denormal(False)
    assert "deterministic algorithms False -> True" in found
    assert not flush or "denormals flushed False -> True" in found


def test_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before = envelope(CPU, 1)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert differences(before, envelope(CPU, 1)) == ["hash seed 0 -> 1"]


@pytest.mark.parametrize("saved", [{}, {"versions": {}, "envelope": None}, {"envelope": {"of another version": 1}}])
def test_checkpoints_that_know_less_are_no_difference(saved: dict[str, Any]) -> None:
    assert differences(saved, envelope(CPU, 1)) == []


def test_the_number_of_ranks_is_told_elsewhere() -> None:
    assert differences(envelope(CPU, 2), envelope(CPU, 3)) == []


def test_a_long_list_is_cut() -> None:
    saved = envelope(CPU, 1)
    saved["versions"] = {name: "0" for name in saved["versions"]}
    saved["envelope"] = {name: "other" for name in saved["envelope"]}
    text = warning(saved, envelope(CPU, 1))
    assert text is not None and " and " in text and " more; " in text and len(text) < 600

"""Errors, ids, text, states and settings: the small things that everything else trusts."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from overnight.core import errors, ids, states, text
from overnight.core.enums import Outcome, RunKind, TrialState
from overnight.core.models.spec import Command, Compute, Distribution, Objective, TrialConfig
from overnight.core.settings import build_settings


def test_every_error_has_its_own_code_and_is_in_the_tree_of_the_docstring() -> None:
    classes = errors.error_classes()
    names = {cls.__name__ for cls in classes.values() if cls.__module__ == errors.__name__}
    drawn = set(re.findall(r"\b\w+Error\b", errors.__doc__ or ""))
    assert names == drawn
    defined = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.OvernightError)]
    assert len({cls.code for cls in defined}) == len(defined) == len(names)


def test_an_error_survives_the_wire() -> None:
    error = errors.NotFoundError("no trial 'x'", hint="List them: overnight ls", ref="x")
    again = errors.from_dict(error.to_dict())
    assert type(again) is errors.NotFoundError
    assert (again.message, again.hint, again.details) == (error.message, error.hint, {"ref": "x"})
    missing = errors.from_dict(errors.MissingExtraError("overnight up", "server").to_dict())
    assert isinstance(missing, errors.MissingExtraError)
    assert "pip install 'overnight[server]'" in str(missing)
    assert type(errors.from_dict({"code": "from-the-future", "message": "m"})) is errors.OvernightError


def test_ids_sort_by_age_and_do_not_collide() -> None:
    made = [ids.new_id("trial") for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert [m[:14] for m in made] == sorted(m[:14] for m in made)
    assert all(re.fullmatch(r"tri-[0-9a-hjkmnp-tv-z]{18}", m) for m in made)


HOSTILE = [
    "\x1b]0;owned\x07x",
    "\x1b[31mred\x1b[0m",
    "a\u202eb",
    "\x9b2J",
    "\x1bP1$r\x1b\\",
    "\x00\x07\x08",
    "\x1b",
    "a\r\nb",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_sanitize_leaves_nothing_that_a_terminal_obeys(value: str) -> None:
    shown = text.sanitize(value)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


@given(st.text(max_size=300), st.integers(1, 50))
def test_sanitize_bounds_and_is_idempotent(value: str, limit: int) -> None:
    shown = text.sanitize(value, limit=limit, one_line=True)
    assert len(shown) <= limit
    assert "\n" not in shown
    assert text.sanitize(shown, limit=limit, one_line=True) == shown


def test_sanitize_keeps_what_is_harmless() -> None:
    assert text.sanitize("[/bold] né 🎉\n\tx") == "[/bold] né 🎉\n\tx"


def test_ends_only_lead_back_to_the_queue_and_every_state_can_end() -> None:
    for end in states.END_STATES:
        assert states.TRIAL_EDGES[end] == {TrialState.QUEUED}
    for state, after in states.TRIAL_EDGES.items():
        assert state not in after
        assert state in states.END_STATES or TrialState.CANCELLED in after
    assert set(states.TRIAL_EDGES) == set(TrialState)


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("may_retry", [True, False])
@pytest.mark.parametrize("stopping", [True, False])
def test_every_outcome_has_a_state_reachable_from_running(outcome: Outcome, may_retry: bool, stopping: bool) -> None:
    after = states.state_after(outcome, may_retry=may_retry, stopping=stopping)
    assert states.can_transition(TrialState.STOPPING if stopping else TrialState.RUNNING, after)
    if outcome in (Outcome.USER_ERROR, Outcome.OUT_OF_MEMORY):
        assert after is TrialState.FAILED


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".hidden", "a..b", "x" * 101, "a b", "http://x", "'; drop table trials;--"]
)
def test_names_that_look_like_paths_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TrialConfig(experiment=name, run=Command(kind=RunKind.SCRIPT, target="x.py"))


def test_compute_reads_ranges() -> None:
    assert (Compute(gpus="2-8").min_devices, Compute(gpus="2-8").max_devices) == (2, 8)
    assert (Compute(nodes=2, gpus_per_node=8).min_devices, Compute().max_devices) == (16, 1)
    for bad in (0, "8-2", "many", "1-", -3):
        with pytest.raises(ValidationError):
            Compute(gpus=bad)


def test_objective_and_distribution_say_what_is_missing() -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Objective(metric="x", source="pattern")
    with pytest.raises(ValidationError, match="group"):
        Objective(metric="x", source="pattern", pattern="loss=.*")
    with pytest.raises(ValidationError, match="low > 0"):
        Distribution(kind="log", low=0, high=1)
    with pytest.raises(ValidationError, match="low <= high"):
        Distribution(kind="range", low=2, high=1)


def test_settings_take_the_environment_over_the_file(tmp_path: Path) -> None:
    env = {"OVERNIGHT_HOME": str(tmp_path), "OVERNIGHT_PORT": "7000", "OVERNIGHT_TRIAL_ID": "not a setting"}
    settings = build_settings(env, 'port = 1\npool = "fake:2"', host=None)
    assert (settings.port, settings.pool, settings.home) == (7000, "fake:2", tmp_path)
    assert settings.effective_store_url == f"sqlite:///{tmp_path}/overnight.db"


@pytest.mark.parametrize(
    ("env", "toml", "words"),
    [
        ({"OVERNIGHT_PORT": "many"}, "", "'port'"),
        ({}, "colour = 1", "there is no setting 'colour'"),
        ({}, "pol = 'cpu:1'", "Did you mean 'pool'"),
        ({"OVERNIGHT_POOOL": "cpu:1"}, "", "OVERNIGHT_POOOL is no setting.*\\s.*OVERNIGHT_POOL"),
        ({}, "port = ", "not TOML"),
        ({"OVERNIGHT_POOL": "gpus"}, "", "pool 'gpus'"),
    ],
)
def test_bad_settings_are_named(env: dict[str, str], toml: str, words: str) -> None:
    with pytest.raises(errors.InvalidSpecError) as caught:
        build_settings(env, toml)
    assert re.search(words, f"{caught.value.message}\n{caught.value.hint}")


def test_variables_of_trials_are_no_mistyped_settings() -> None:
    names = re.findall(r"`(OVERNIGHT_\w+)`", (Path(__file__).parents[2] / "docs" / "architecture.md").read_text())
    assert len(names) > 10
    assert build_settings({name: "x" for name in names if name != "OVERNIGHT_HOME"} | {"HOME": "/h"}).pool is None

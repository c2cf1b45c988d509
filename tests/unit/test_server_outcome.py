# ruff: noqa: E501 (the rows of a table stay on their lines)
"""The table "Outcome of an attempt", row by row, and the rule that nothing odd can break it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.enums import DirectiveAction, Outcome
from overnight.core.models.api import TrialError
from overnight.core.models.node import Directive
from overnight.core.models.spec import Objective
from overnight.platform.outcome import Exit, ObjectiveState, decide_outcome

CONTINUE = Directive()
YIELD = Directive(version=1, action=DirectiveAction.YIELD, reason="preempted")
SHUTDOWN = Directive(version=1, action=DirectiveAction.YIELD, reason="shutdown")
PRUNE = Directive(version=2, action=DirectiveAction.STOP, reason="pruned")
CANCEL = Directive(version=2, action=DirectiveAction.STOP, reason="cancelled")
NOTHING_ASKED = ObjectiveState()
GOOD = ObjectiveState("loss", 0.5)
MISSING = ObjectiveState("loss")
BAD_DEVICE = ["gpu 2 was quarantined: xid 79"]


def ended(*codes: int | None, **more: Any) -> Exit:
    return Exit(exit_codes=codes, **more)


def raised(kind: str, message: str = "boom", step: int | None = 7) -> TrialError:
    return TrialError(type=kind, message=message, step=step)


O = Outcome  # noqa: E741

ROWS = [
    # completed, and the objective rule
    ("clean", ended(0, 0), CONTINUE, [], GOOD, O.COMPLETED, "exited with 0"),
    ("clean, nothing asked", ended(0), CONTINUE, [], NOTHING_ASKED, O.COMPLETED, ""),
    ("clean but never reported", ended(0), CONTINUE, [], MISSING, O.USER_ERROR, "'loss' was never reported"),
    ("clean but nan", ended(0), CONTINUE, [], ObjectiveState("loss", 0.5, "nan"), O.USER_ERROR, "is nan"),
    ("clean but text", ended(0), CONTINUE, [], ObjectiveState("loss", None, "'high'"), O.USER_ERROR, "is 'high'"),
    ("clean but inf", ended(0), CONTINUE, [], ObjectiveState("loss", float("inf")), O.USER_ERROR, "is inf"),
    ("finished before it saw the yield", ended(0), YIELD, [], GOOD, O.COMPLETED, ""),
    ("finished before it saw the cancel", ended(0), CANCEL, [], GOOD, O.COMPLETED, ""),
    ("exit 0 on the cancel, no value", ended(0), CANCEL, [], MISSING, O.CANCELLED, "cancelled"),
    ("finished although a device was condemned", ended(0), CONTINUE, BAD_DEVICE, GOOD, O.COMPLETED, ""),
    # yield
    ("left on yield", ended(75, left="yield", saved=True), YIELD, [], MISSING, O.PREEMPTED, "preempted"),
    ("left on yield, unsaved", ended(75, left="yield"), YIELD, [], GOOD, O.PREEMPTED, "nothing was saved"),
    ("left on yield of a drain", ended(75, left="yield", saved=True), YIELD, BAD_DEVICE, GOOD, O.PREEMPTED, ""),
    ("shutdown", ended(75, left="yield", saved=True), SHUTDOWN, [], GOOD, O.PREEMPTED, "shutdown"),
    ("killed after the grace", ended(-9, killed="grace over"), YIELD, [], GOOD, O.PREEMPTED, "nothing was saved: grace"),
    ("command died of the signal", ended(-15), YIELD, [], GOOD, O.PREEMPTED, "nothing was saved: rank 0"),
    ("75 unasked", ended(75), CONTINUE, [], GOOD, O.USER_ERROR, "without having been asked"),
    ("raised while yielding", ended(1, error=raised("ValueError")), YIELD, [], GOOD, O.USER_ERROR, "ValueError: boom"),
    ("segfault while yielding", ended(-11), YIELD, [], GOOD, O.INFRA_FAULT, "SIGSEGV"),
    # stop
    ("pruned", ended(0, left="stop", saved=True), PRUNE, [], GOOD, O.PRUNED, "pruned"),
    ("cancelled", ended(0, left="stop", saved=True), CANCEL, [], GOOD, O.CANCELLED, "cancelled"),
    ("cancelled, killed", ended(-9, killed="grace over"), CANCEL, [], GOOD, O.CANCELLED, "grace over"),
    ("cancelled, deaf", ended(-9, killed="grace"), CANCEL, [], GOOD, O.CANCELLED, "when its grace was over, and was ended"),
    ("cancelled, script exits 143", ended(143), CANCEL, [], GOOD, O.CANCELLED, "exited with 143"),
    ("cancelled, then vanished", None, CANCEL, [], GOOD, O.CANCELLED, "vanished"),
    ("pruned on a condemned device", ended(-9), PRUNE, BAD_DEVICE, GOOD, O.PRUNED, ""),
    ("failed before the cancel arrived", ended(1, error=raised("KeyError")), CANCEL, [], GOOD, O.USER_ERROR, "KeyError"),
    ("a stop nobody gave", ended(0, left="stop"), CONTINUE, [], GOOD, O.INFRA_FAULT, "nobody gave"),
    # infrastructure
    ("device condemned", ended(-9), CONTINUE, BAD_DEVICE, GOOD, O.INFRA_FAULT, "xid 79"),
    ("device error raised in Python", ended(1, error=raised("RuntimeError")), CONTINUE, BAD_DEVICE, GOOD, O.INFRA_FAULT, "xid"),
    ("device condemned, vanished", None, CONTINUE, BAD_DEVICE, GOOD, O.INFRA_FAULT, "xid 79"),
    ("vanished", None, CONTINUE, [], GOOD, O.VANISHED, "vanished"),
    ("vanished while yielding", None, YIELD, [], GOOD, O.VANISHED, "vanished"),
    ("killed by a stranger", ended(0, -9), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 1 was killed by SIGKILL"),
    ("peers killed after a stranger's kill", ended(-9, -9, killed="rank 0 died"), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 0 died"),
    ("a peer of a killed rank raises", ended(1, -9, failed_rank=1, error_rank=0, error=raised("RuntimeError", "reset")), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 1 was killed by SIGKILL"),
    ("the same while yielding", ended(1, -9, failed_rank=1, error_rank=0, error=raised("RuntimeError")), YIELD, [], GOOD, O.INFRA_FAULT, "rank 1"),
    ("a peer without a trainer exits with 1", ended(1, -9, failed_rank=1), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 1"),
    ("a peer of a crashed rank is ended", ended(-15, -11, failed_rank=1, killed="peer_failed"), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 1 was killed by SIGSEGV"),
    ("raised, and crashed on the way out", ended(0, -6, failed_rank=1, error_rank=1, error=raised("ValueError")), CONTINUE, [], GOOD, O.USER_ERROR, "ValueError"),
    ("raised by nobody knows whom", ended(1, -6, failed_rank=1, error=raised("ValueError")), CONTINUE, [], GOOD, O.USER_ERROR, "ValueError"),
    ("killed for its peer's exception", ended(-9, 1, failed_rank=1, error_rank=1, killed="peer_failed", error=raised("ValueError")), CONTINUE, [], GOOD, O.USER_ERROR, "ValueError"),
    ("killed by the kernel, its peer raises", ended(1, -9, oom=True, failed_rank=1, error_rank=0, error=raised("RuntimeError")), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, "out of memory"),
    ("unknown end", ended(0, None), CONTINUE, [], GOOD, O.INFRA_FAULT, "rank 1 ended is unknown"),
    ("no rank at all", ended(), CONTINUE, [], GOOD, O.INFRA_FAULT, "no rank was started"),
    # the user's own
    ("exception", ended(1, error=raised("ValueError")), CONTINUE, [], GOOD, O.USER_ERROR, "ValueError: boom at step 7"),
    ("exception, peers killed", ended(-9, 1, killed="rank 1 failed", error=raised("ValueError")), CONTINUE, [], GOOD, O.USER_ERROR, "ValueError"),
    ("exit code", ended(3), CONTINUE, [], GOOD, O.USER_ERROR, "rank 0 exited with 3"),
    ("exit code, peers killed", ended(-9, 2, killed="rank 1 failed"), CONTINUE, [], GOOD, O.USER_ERROR, ""),
    ("too long", ended(-15, killed="grace", out_of_time=True), CONTINUE, [], GOOD, O.USER_ERROR, "longer than its max_time"),
    ("too long, saved", ended(75, left="stop", saved=True, out_of_time=True), CONTINUE, [], GOOD, O.USER_ERROR, "saved"),
    # memory
    ("MemoryError", ended(1, error=raised("MemoryError", "")), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, "MemoryError"),
    ("torch OOM", ended(1, error=raised("torch.OutOfMemoryError")), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, ""),
    ("old CUDA OOM", ended(1, error=raised("RuntimeError", "CUDA out of memory. Tried")), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, ""),
    ("CPU allocator", ended(1, error=raised("RuntimeError", "DefaultCPUAllocator: can't allocate memory")), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, ""),
    ("kernel", ended(-9, oom=True), CONTINUE, [], GOOD, O.OUT_OF_MEMORY, "kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("exit", "directive", "verdicts", "objective", "outcome", "words"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])  # fmt: skip
def test_table(
    exit: Exit | None,
    directive: Directive,
    verdicts: list[str],
    objective: ObjectiveState,
    outcome: Outcome,
    words: str,
) -> None:
    found, cause = decide_outcome(exit, directive, verdicts, objective)
    assert found is outcome, cause
    assert words in cause


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
KEYS = ["exit_codes", "left", "saved", "killed", "error", "last_lines", "oom", "other"]


@given(
    data=st.dictionaries(st.sampled_from(KEYS), JSON),
    action=st.sampled_from(DirectiveAction),
    reason=st.text(max_size=10) | st.sampled_from(["pruned", "cancelled", "preempted"]),
    verdicts=st.lists(st.text(max_size=5), max_size=2),
    value=st.none() | st.floats(),
)
def test_any_report_ends_an_attempt(
    data: dict[str, Any], action: DirectiveAction, reason: str, verdicts: list[str], value: float | None
) -> None:
    """Whatever a supervisor of another version, or a torn file, says: there is an outcome, with a cause."""
    directive = Directive(version=1, action=action, reason=reason)
    outcome, cause = decide_outcome(Exit.parse(data), directive, verdicts, ObjectiveState("loss", value))
    assert isinstance(outcome, Outcome) and isinstance(cause, str)
    if outcome in (Outcome.PRUNED, Outcome.CANCELLED):
        assert action is DirectiveAction.STOP, "never stopped without having been told to"
    if outcome is Outcome.COMPLETED:
        assert Exit.parse(data).clean and value is not None and abs(value) < float("inf")


def test_without_an_objective_nothing_is_asked() -> None:
    assert ObjectiveState.of(None, None, "nan").problem is None
    assert ObjectiveState.of(Objective(metric="acc"), None, None).problem is not None


def test_huge_output_is_cut() -> None:
    found = Exit.parse({"last_lines": ["x" * 100_000] * 1000, "error": {"type": "E", "message": "m" * 10**6}})
    assert len(found.last_lines) == 50 and len(found.last_lines[0]) == 8192
    assert found.error is not None and len(found.error.message) == 20_000 and found.error.last_lines == found.last_lines

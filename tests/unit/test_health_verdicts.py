"""What is thought of a device after a report."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.enums import DeviceState
from overnight.core.errors import InvalidSpecError
from overnight.core.models.node import DeviceReport
from overnight.platform.health.causes import CauseAction, parse_causes, shipped_causes
from overnight.platform.health.verdict import History, Verdict, judge, judge_neighbour, preflight
from overnight.testing.clock import START

TABLE = shipped_causes()
HEALTHY = History(DeviceState.HEALTHY)


def report(fatal: str | None = None, soft: str | None = None, busy: bool = False) -> DeviceReport:
    return DeviceReport(
        index=0, kind="gpu", type="h100", memory_bytes=1, uuid="u", fatal=fatal, soft=soft, busy=busy, evidence={"c": 1}
    )


def after(verdict: Verdict | None, before: History) -> History:
    return before if verdict is None else History.load(verdict.state, verdict.cause, verdict.until, verdict.evidence)


@pytest.mark.parametrize(
    "number", [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 79], ids=lambda n: f"xid_{n}"
)
def test_fatal_causes_quarantine_at_once(number: int) -> None:
    assert TABLE.split([f"xid_{number}"]) == (f"xid_{number}", None)
    verdict = judge(report(fatal=f"xid_{number}"), HEALTHY, START, TABLE)
    assert verdict is not None
    assert verdict.state is DeviceState.QUARANTINED
    assert verdict.cause.startswith(f"xid_{number}: ")
    assert verdict.until == START + timedelta(hours=TABLE.quarantine_hours)
    assert verdict.evidence["report"] == {"c": 1}


@pytest.mark.parametrize("name", ["row_remap_failed", "ecc_uncorrectable", "gpu_lost", "recovery_action"])
def test_other_fatal_causes(name: str) -> None:
    assert TABLE.get(name).is_fatal


@pytest.mark.parametrize("number", [92, 93, 121, 154])
def test_informative_xids_are_neither(number: int) -> None:
    assert TABLE.split([f"xid_{number}"]) == (None, None)


def test_an_unknown_signal_is_suspicious() -> None:
    assert TABLE.split(["xid_99999"]) == (None, "xid_99999")


def test_the_worst_of_several_wins() -> None:
    assert TABLE.split(["xid_92", "xid_13", "xid_79", "xid_48"]) == ("xid_79", "xid_13")


def test_a_repeated_report_says_nothing_new() -> None:
    first = judge(report(fatal="xid_79"), HEALTHY, START, TABLE)
    again = judge(report(fatal="xid_79"), after(first, HEALTHY), START + timedelta(minutes=5), TABLE)
    assert again is None


def test_a_quarantine_ends_by_time_but_not_while_the_fault_lasts() -> None:
    history = after(judge(report(fatal="xid_79"), HEALTHY, START, TABLE), HEALTHY)
    late = START + timedelta(hours=TABLE.quarantine_hours, seconds=1)
    assert judge(report(), history, START + timedelta(minutes=59), TABLE) is None
    longer = judge(report(fatal="xid_79"), history, late, TABLE)
    assert longer is not None and longer.until is not None and longer.until > late
    released = judge(report(), history, late, TABLE)
    assert released is not None and released.state is DeviceState.HEALTHY


def test_a_quarantine_by_a_person_ends_by_a_person() -> None:
    history = History(DeviceState.QUARANTINED, "smells burnt", until=None)
    assert judge(report(), history, START + timedelta(days=365), TABLE) is None
    assert judge(report(fatal="xid_79"), history, START, TABLE) is None


def test_a_drained_device_stays_drained_unless_it_breaks() -> None:
    history = History(DeviceState.DRAINING, "taken")
    assert judge(report(busy=True), history, START, TABLE) is None
    assert judge(report(soft="xid_74"), history, START, TABLE) is None
    verdict = judge(report(fatal="xid_48"), history, START, TABLE)
    assert verdict is not None and verdict.state is DeviceState.QUARANTINED


CULPRIT = "xid_79 on node1:2: the GPU is no longer reachable over the bus"


def test_the_neighbours_of_a_lost_device_drain_and_come_back_by_themselves() -> None:
    assert [name for name in TABLE.causes if TABLE.get(name).condemns_node] == [
        "xid_79", "gpu_lost", "device_count_changed",
    ]  # fmt: skip
    history = after(judge_neighbour(report(soft="xid_74"), HEALTHY, CULPRIT, START, TABLE), HEALTHY)
    assert (history.state, history.cause) == (DeviceState.DRAINING, CULPRIT)
    assert history.suspicion == 1.0, "its own signals count meanwhile"
    within, late = START + timedelta(minutes=59), START + timedelta(hours=TABLE.quarantine_hours, seconds=1)
    assert judge_neighbour(report(), history, CULPRIT, within, TABLE) is None
    assert judge(report(), history, within, TABLE) is None, "the fault is over, but not for long enough"
    longer = judge_neighbour(report(), history, CULPRIT, late, TABLE)
    assert longer is not None and longer.until is not None and longer.until > late
    back = judge(report(), history, late, TABLE)
    assert back is not None and back.state is DeviceState.SUSPECT


def test_a_neighbours_fault_changes_neither_a_persons_word_nor_what_is_worse() -> None:
    for known in (
        History(DeviceState.DRAINING, "taken"),
        History(DeviceState.QUARANTINED, "smells burnt"),
        History(DeviceState.QUARANTINED, "xid_48: x", until=START + timedelta(minutes=1)),
    ):
        assert judge_neighbour(report(), known, CULPRIT, START, TABLE) is None
    verdict = judge(report(fatal="xid_48"), History(DeviceState.DRAINING, CULPRIT, START), START, TABLE)
    assert verdict is not None and verdict.state is DeviceState.QUARANTINED


def test_a_strangers_process_is_no_suspicion() -> None:
    busy = judge(report(busy=True), HEALTHY, START, TABLE)
    assert busy is not None and busy.state is DeviceState.BUSY
    history = after(busy, HEALTHY)
    assert history.suspicion == 0
    free = judge(report(), history, START, TABLE)
    assert free is not None and free.state is DeviceState.HEALTHY


def test_a_node_that_speaks_again_brings_its_devices_back() -> None:
    verdict = judge(report(), History(DeviceState.LOST, "silent"), START, TABLE)
    assert verdict is not None and verdict.state is DeviceState.HEALTHY and verdict.cause == ""


def see(history: History, soft: str | None, hours: float) -> History:
    return after(judge(report(soft=soft), history, START + timedelta(hours=hours), TABLE), history)


def test_soft_causes_count_when_they_appear_and_decay() -> None:
    history = see(HEALTHY, "xid_74", 0)
    assert history.state is DeviceState.SUSPECT
    for _ in range(100):
        history = see(history, "xid_74", 0)
    assert history.suspicion == 1.0, "presence is not appearance"
    history = see(history, None, 0.1)
    assert history.state is DeviceState.SUSPECT
    assert see(history, None, 23).state is DeviceState.SUSPECT
    assert see(history, None, 25).state is DeviceState.HEALTHY


def test_many_hardware_signals_quarantine() -> None:
    history = HEALTHY
    for number in range(3):
        history = see(see(history, "xid_74", number / 10), None, number / 10 + 0.05)
    assert history.state is DeviceState.QUARANTINED
    assert history.until is not None


def test_a_programs_faults_alone_never_quarantine() -> None:
    history = HEALTHY
    for number in range(200):
        history = see(see(history, "xid_13", number / 100), None, number / 100 + 0.001)
    assert history.state is DeviceState.SUSPECT


def test_three_program_faults_within_a_day_make_suspect_two_do_not() -> None:
    history = HEALTHY
    for hours in (0.0, 0.5):
        history = see(see(history, "xid_31", hours), None, hours + 0.1)
    assert history.state is DeviceState.HEALTHY
    assert see(history, "xid_31", 1.0).state is DeviceState.SUSPECT


@given(st.lists(st.tuples(st.sampled_from([None, "xid_13", "xid_74", "xid_79", "busy"]), st.integers(-50, 200))))
def test_a_verdict_always_changes_what_people_see(steps: list[tuple[str | None, int]]) -> None:
    """The store keeps evidence only with a change of state, cause or end: a verdict without one would be lost."""
    history, now = HEALTHY, START
    for what, minutes in steps:
        now += timedelta(minutes=minutes)
        fatal = what if what == "xid_79" else None
        soft = what if what in ("xid_13", "xid_74") else None
        verdict = judge(report(fatal, soft, what == "busy"), history, now, TABLE)
        if verdict is not None:
            assert (verdict.state, verdict.cause, verdict.until) != (history.state, history.cause, history.until)
            history = after(verdict, history)
        if fatal:
            assert history.state is DeviceState.QUARANTINED
        assert history.suspicion >= 0


def test_preflight() -> None:
    assert preflight(report()) is None
    assert preflight(report(soft="xid_13")) is None
    assert preflight(report(fatal="xid_48")) == "xid_48"
    assert preflight(report(busy=True)) == "another program uses it"


def test_the_table_can_be_overridden() -> None:
    text = (
        'version = "mine"\nquarantine_hours = 4\n[[cause]]\nnames = ["xid_94"]\naction = "quarantine"\nmeaning = "x"\n'
    )
    table = parse_causes(text, TABLE)
    assert table.get("xid_94").is_fatal and not TABLE.get("xid_94").is_fatal
    assert table.get("xid_79").action is CauseAction.QUARANTINE_NODE
    assert (table.version, table.quarantine_hours, table.suspect_at) == ("mine", 4.0, TABLE.suspect_at)


@pytest.mark.parametrize(
    "text",
    [
        "no toml",
        '[[cause]]\nnames = ["x"]\naction = "explode"\nmeaning = "x"',
        '[[cause]]\nnames = ["x"]\naction = "suspect"\nmeaning = "x"',
        '[[cause]]\nnames = ["x"]\naction = "suspect"\nweight = -1\nmeaning = "x"',
        "suspect_at = 0",
        "unknown = 3",
    ],
)
def test_a_bad_table_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="health causes"):
        parse_causes(text, TABLE)

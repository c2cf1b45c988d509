"""Rows of checkpoints agree with the files: those of deleted ones stay, count for what was, and are shown to nobody."""

from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from overnight.core.models.node import SpoolEvent
from overnight.store import checkpoints, events, models
from overnight.store.events import NewEvent
from overnight.store.projection import facts

Lab = Any
PLACE = "/home/trials/t/checkpoints"


def name(step: int, save: int = 1) -> str:
    return f"step-{step}.attempt-1.1" + (f".again-{save}" if save > 1 else "")


def begin(lab: Lab, *uris: tuple[int, str]) -> str:
    """A trial that has told of these commits; its id."""
    trial = lab.trial()
    attempt = lab.begin(trial)
    for number, (step, uri) in enumerate(uris, 1):
        data = {"step": step, "uri": uri, "bytes": number}
        event = {"seq": number, "kind": "checkpoint", "generation": 1, "at": 1.0, "data": data}
        lab.spool(attempt, SpoolEvent.model_validate(event))
    return str(trial.id)


def compare(lab: Lab, trial_id: str, *names: str, seconds: float = 60.0) -> checkpoints.Differences:
    """Compares with a place that holds these, looked at ``seconds`` from now."""
    looked_at = lab.now + timedelta(seconds=seconds)
    with lab.store.read() as conn:
        return checkpoints.compare(conn, trial_id, PLACE, names, looked_at)


def record(lab: Lab, trial_id: str, *names: str) -> None:
    found = compare(lab, trial_id, *names)
    lab.store.write(lambda conn: checkpoints.mark(conn, lab.now, found))


def shown(lab: Lab, trial_id: str) -> list[int]:
    return [one.step for one in lab.get(trial_id).checkpoints]


def test_what_is_gone_is_not_shown_and_comes_back_with_its_files(lab: Lab) -> None:
    trial_id = begin(lab, *((step, f"{PLACE}/{name(step)}") for step in (10, 20, 30)))
    assert not compare(lab, trial_id, *map(name, (10, 20, 30)))
    record(lab, trial_id, name(30))
    assert shown(lab, trial_id) == [30] and not compare(lab, trial_id, name(30))
    record(lab, trial_id, name(10), name(30), "step-99.attempt-7.1")
    assert shown(lab, trial_id) == [10, 30]
    assert not compare(lab, trial_id, name(10), name(30), "step-99.attempt-7.1"), "nobody told of that one"
    record(lab, trial_id)
    assert shown(lab, trial_id) == []


def test_a_deleted_checkpoint_counts_for_what_was(lab: Lab) -> None:
    trial_id = begin(lab, (10, f"{PLACE}/{name(10)}"), (20, f"{PLACE}/{name(20)}"))
    record(lab, trial_id, name(10))
    with lab.store.read() as conn:
        assert checkpoints.newest(conn, [trial_id])[trial_id].step == 20, "what is committed again is no progress"
        assert facts(conn, [trial_id])[trial_id].committed == {(1, 1): 20}, "a start may have forked there"


def test_what_was_committed_while_somebody_looked_is_not_taken_for_gone(lab: Lab) -> None:
    trial_id = begin(lab, (10, f"{PLACE}/{name(10)}"))
    assert not compare(lab, trial_id, seconds=-60.0)
    assert [one.step for one in compare(lab, trial_id).gone] == [10]


def test_what_a_script_keeps_elsewhere_is_left_alone(lab: Lab) -> None:
    trial_id = begin(lab, (10, "s3://bucket/mine"), (20, f"{PLACE}-of-another/{name(20)}"))
    assert not compare(lab, trial_id)


def test_of_several_saves_at_one_step_the_last_counts(lab: Lab) -> None:
    trial_id = begin(lab, (10, f"{PLACE}/{name(10)}"), (10, f"{PLACE}/{name(10, 2)}"))
    record(lab, trial_id, name(10, 2))
    assert [one.uri for one in lab.get(trial_id).checkpoints] == [f"{PLACE}/{name(10, 2)}"]


def test_a_checkpoint_that_is_made_anew_is_there(lab: Lab) -> None:
    trial_id = begin(lab, (10, f"{PLACE}/{name(10)}"))
    record(lab, trial_id)
    before = lab.get(trial_id)
    assert before.checkpoints == ()
    attempt = before.attempts[0]
    data = {"step": 10, "uri": f"{PLACE}/{name(10)}", "bytes": 5}
    event = {"seq": 2, "kind": "checkpoint", "generation": 1, "at": 1.0, "data": data}
    lab.spool(attempt, SpoolEvent.model_validate(event))
    assert shown(lab, trial_id) == [10]


def test_passwords_that_older_versions_have_stored_are_not_shown(lab: Lab) -> None:
    trial_id = begin(lab, (10, f"{PLACE}/{name(10)}"))
    attempt = lab.get(trial_id).attempts[0]
    told = "sftp://me:Hunter2@host/x"
    error = {"type": "OSError", "message": f"{told} is away", "traceback": f"OSError: {told}", "last_lines": [told]}

    def store_as_they_did(conn: sa.Connection) -> None:
        conn.execute(sa.update(models.checkpoints).values(uri=f"{told}/{name(10)}"))
        of_attempt = models.attempts.c.id == attempt.id
        conn.execute(sa.update(models.attempts).where(of_attempt).values(error=error, cause=f"OSError: {told}"))
        new = NewEvent("note", "digits", "test", f"for {told}", trial_id, data={"causes": [told]})
        events.append(conn, lab.now, new)

    lab.store.write(store_as_they_did)
    trial = lab.get(trial_id)
    with lab.store.read() as conn:
        page = events.page(conn, 0, limit=1000)
        again = checkpoints.compare(conn, trial_id, told, [], lab.now + timedelta(seconds=60))
    text = trial.model_dump_json() + page.model_dump_json()
    assert "Hunter2" not in text and text.count("sftp://me:***@host/x") == 7, text
    assert [one.step for one in again.gone] == [10], "they are still compared with the place"


def test_no_password_is_stored(lab: Lab) -> None:
    trial_id = begin(lab, (10, "sftp://me:Hunter2@host/x"))
    with lab.store.read() as conn:
        assert conn.scalars(sa.select(models.checkpoints.c.uri)).all() == ["sftp://me:***@host/x"]
    assert lab.get(trial_id).checkpoints[0].uri == "sftp://me:***@host/x"

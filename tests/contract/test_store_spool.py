"""The spool's events become rows once and in order, and only along the lineage that counts."""

import math
import random
from typing import Any

import pytest

from overnight.core.enums import LeaseState, Outcome, TrialState
from overnight.core.errors import BadInputError, NotFoundError, StaleAttemptError
from overnight.core.models.node import SpoolEvent
from overnight.core.models.spec import Objective
from overnight.store import attempts, events, lineages, metrics, outbox, trials

Lab = Any
S = TrialState


def event(seq: int, kind: str, generation: int = 1, at: float = 100.0, **data: Any) -> SpoolEvent:
    return SpoolEvent.model_validate({"seq": seq, "kind": kind, "generation": generation, "at": at, "data": data})


def rows(*steps: int, key: str = "loss", offset: float = 0.0) -> list[list[Any]]:
    return [[key, step, step + offset, float(step)] for step in steps]


def steps_of(lab: Lab, trial_id: str, key: str = "loss", lineage: bool = True) -> list[tuple[int, float | None]]:
    with lab.store.read() as conn:
        page = metrics.points(conn, trial_id, key, lineage)
    return [(point.step, point.value) for point in page.items]


class TestIngest:
    def test_each_kind_reaches_its_table(self, lab: Lab) -> None:
        trial = lab.trial()
        attempt = lab.begin(trial)
        error = {"type": "ValueError", "message": "bad", "traceback": "", "step": 3}
        acked = lab.spool(
            attempt,
            event(1, "started", pids={"0": 1}, warm=True, trainer=True),
            event(2, "progress", step=3, phase="train"),
            event(3, "metrics", rows=[["loss", 1, 0.5, 1.0], ["loss", 2, "nan", 2.0]]),
            event(4, "report", step=3, values={"accuracy": 0.9}),
            event(5, "checkpoint", step=3, uri="/ckpt/step-3", bytes=10, generation=1),
            event(6, "ledger", seconds={"productive": 1.5}, counts={"batches": 2}),
            event(7, "ledger", seconds={"productive": 0.5, "restore": 1.0}),
            event(8, "mlflow", params={"lr": 0.1}, tags={"note": "x"}),
            event(9, "exit", exit_codes=[1], error=error, value=float("inf")),
        )
        assert acked == 9
        found = lab.get(trial.id)
        assert (found.state, found.step, found.value) == (S.RUNNING, 3, 0.9)
        assert [(c.step, c.uri, c.bytes) for c in found.checkpoints] == [(3, "/ckpt/step-3", 10)]
        assert found.attempts[0].ledger == {"productive": 2.0, "restore": 1.0, "count.batches": 2.0}
        assert found.attempts[0].started_at is not None
        with lab.store.read() as conn:
            points = metrics.points(conn, trial.id).items
            assert [(p.key, p.step, p.value, p.text) for p in points] == [
                ("accuracy", 3, 0.9, None),
                ("loss", 1, 0.5, None),
                ("loss", 2, None, "nan"),
            ]
            assert attempts.exit_report(conn, attempt.id) == {"exit_codes": [1], "error": error, "value": "inf"}
            told = {row.kind: row.data for row in outbox.pending(conn)}
            assert told["params"]["values"] == {"lr": "0.1"}
            assert told["tags"]["values"] == {"note": "x"}
            assert told["metrics"]["rows"][1] == ["loss", 2, "nan", 2.0]
            [sched] = trials.schedulable(conn)
        assert (sched.tracked, sched.last_commit_step) == (True, 3)

    def test_whatever_is_sent_twice_or_in_pieces_counts_once(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        sent = [event(seq, "ledger", seconds={"productive": 1.0}) for seq in range(2, 22)]
        dice = random.Random(7)
        acked = 1
        while acked < 21:
            start = dice.randrange(0, len(sent))
            piece = sent[start : start + dice.randrange(1, 6)]
            dice.shuffle(piece)
            found = lab.spool(attempt, *piece)
            assert found >= acked
            acked = found
        assert lab.spool(attempt, *sent) == 21
        assert lab.get(trial.id).attempts[0].ledger == {"productive": 20.0}

    def test_what_comes_after_a_gap_waits(self, lab: Lab) -> None:
        _, attempt = lab.run()
        assert lab.spool(attempt, event(3, "progress", step=3)) == 1
        assert lab.spool(attempt, event(4, "progress", step=4), event(2, "progress", step=2)) == 2
        assert lab.spool(attempt) == 2

    def test_an_event_without_sense_is_recorded_and_passed_over(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        bad = [
            event(2, "metrics", rows=[["loss", "three", 1.0, 1.0]]),
            event(3, "metrics", rows=[["loss", 1]]),
            event(4, "metrics"),
            event(5, "report", step=2**70, values={"accuracy": 1.0}),
            event(6, "report", step=1, values=None),
            event(7, "checkpoint", step=1, uri="x"),
            event(8, "checkpoint", step=float("nan"), uri="x", bytes=1),
            event(9, "ledger", seconds={"productive": float("inf")}),
            event(10, "mlflow", params=[1]),
            event(11, "progress", step="far"),
            event(12, "started", fork_step="x"),
        ]
        assert lab.spool(attempt, *bad, event(13, "metrics", rows=rows(5))) == 13
        assert steps_of(lab, trial.id) == [(5, 5.0)]
        with lab.store.read() as conn:
            page = events.page(conn, trial_id=trial.id, kinds=["spool.refused"])
        assert [e.data["seq"] for e in page.items] == list(range(2, 13))

    def test_odd_text_goes_through(self, lab: Lab) -> None:
        texts = ["[/bold]", "\x1b]0;x\x07", "a\x00b", "é" * 300, "'; DROP TABLE x;--", "", "."]
        trial, attempt = lab.run()
        for number, text in enumerate(texts):
            first = 2 + 7 * number
            sent = [
                event(first, "metrics", rows=[[text, 1, 1.0, 1.0]]),
                event(first + 1, "report", step=1, values={text: text}),
                event(first + 2, "progress", step=1, phase=text),
                event(first + 3, "checkpoint", step=number, uri=text, bytes=1),
                event(first + 4, "ledger", seconds={text: 1.0}),
                event(first + 5, "mlflow", tags={text: text}),
                event(first + 6, "exit", exit_codes=[0], last_lines=[text]),
            ]
            assert lab.spool(attempt, *sent) == first + 6
            with lab.store.read() as conn:
                assert attempts.exit_report(conn, attempt.id) == {"exit_codes": [0], "last_lines": [text]}
        assert [checkpoint.uri for checkpoint in lab.get(trial.id).checkpoints] == texts
        seen, cursor = 0, None
        for _ in texts:
            with lab.store.read() as conn:
                page = metrics.points(conn, trial.id, after=cursor, limit=1)
                assert events.page(conn, kinds=["spool.refused"]).items == ()
            seen, cursor = seen + len(page.items), page.cursor
        assert seen == len(texts)

    def test_an_unknown_attempt(self, lab: Lab) -> None:
        from overnight.store import spool

        with pytest.raises(NotFoundError):
            lab.store.write(lambda conn: spool.ingest(conn, "nope", 1, [], lab.now))


class TestFencing:
    def test_a_stale_attempt_changes_nothing_and_learns_it(self, lab: Lab) -> None:
        trial, old = lab.run()
        lab.end(old, Outcome.VANISHED, S.QUEUED)
        lab.clean(old)
        new = lab.begin(trial)
        lab.spool(new, event(1, "started"), event(2, "metrics", rows=rows(1)))
        for sent in ([event(2, "metrics", rows=rows(1, offset=50.0))], []):
            with pytest.raises(StaleAttemptError):
                lab.spool(old, *sent)
        assert steps_of(lab, trial.id) == [(1, 1.0)]
        assert lab.get(trial.id).attempts[0].lease_state is LeaseState.CLEAN

    def test_a_lost_answer_can_be_asked_for_after_the_end(self, lab: Lab) -> None:
        _, attempt = lab.run()
        last = event(2, "exit", exit_codes=[0])
        lab.spool(attempt, last)
        lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
        assert lab.spool(attempt, last) == 2
        with pytest.raises(StaleAttemptError):
            lab.spool(attempt, event(3, "progress", step=1))

    def test_a_generation_that_is_over(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "generation", 2, generation_=2, fork_step=0), generation=2)
        assert lab.get(trial.id).attempts[0].generation == 2
        with pytest.raises(StaleAttemptError):
            lab.spool(attempt, event(3, "progress", step=1), generation=1)

    def test_a_restart_and_a_hang_are_on_record(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        hang = event(2, "hang", cause="rank 0 made no progress for 600 s", stacks="/a/stacks-1.txt")
        cause = "rank 0 was ended by SIGSEGV"
        lab.spool(attempt, hang, event(3, "generation", 2, cause=cause, pids={"0": 7}), generation=2)
        lab.spool(attempt, event(4, "generation", 2, fork_step=3), generation=2)
        with lab.store.read() as conn:
            found = [one for one in events.page(conn, trial_id=trial.id).items if one.kind.startswith("attempt.")]
        assert [(one.kind, one.cause) for one in found] == [
            ("attempt.hung", "rank 0 made no progress for 600 s"),
            ("attempt.restarted", cause),
        ]
        assert [one.data for one in found] == [{"generation": 1, "stacks": "/a/stacks-1.txt"}, {"generation": 2}]
        again = lab.get(trial.id)
        assert (again.state, again.retries_used, again.attempts[0].generation) == (S.RUNNING, 0, 2)

    def test_started_does_not_revive_a_trial_that_is_being_stopped(self, lab: Lab) -> None:
        trial = lab.trial()
        attempt = lab.begin(trial)
        lab.store.write(lambda conn: trials.cancel(conn, trial_id=trial.id, actor="me", reason="", now=lab.now))
        lab.spool(attempt, event(1, "started"))
        assert lab.get(trial.id).state is S.STOPPING


class TestLineage:
    def test_steps_beyond_the_fork_do_not_count(self, lab: Lab) -> None:
        trial, first = lab.run()
        lab.spool(first, event(2, "metrics", rows=rows(1, 2, 3, 4, 5)))
        lab.end(first, Outcome.VANISHED, S.QUEUED)
        lab.clean(first)
        second = lab.begin(trial)
        lab.spool(second, event(1, "started", fork_step=3), event(2, "metrics", rows=rows(4, offset=0.5)))
        assert steps_of(lab, trial.id) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
        assert len(steps_of(lab, trial.id, lineage=False)) == 6
        with lab.store.read() as conn:
            assert lineages.tokens(conn, trial.id) == [
                lineages.Token(1, 1, None, 3),
                lineages.Token(2, 1, 3, None),
            ]

    def test_a_fork_far_back_cuts_all_ancestors(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "metrics", rows=rows(1, 2, 3, 4)))
        lab.spool(attempt, event(3, "generation", 2, fork_step=3), generation=2)
        lab.spool(attempt, event(4, "metrics", 2, rows=rows(4, 5, offset=0.1)), generation=2)
        lab.spool(attempt, event(5, "generation", 3, fork_step=1), generation=3)
        lab.spool(attempt, event(6, "metrics", 3, rows=rows(2, offset=0.2)), generation=3)
        assert steps_of(lab, trial.id) == [(1, 1.0), (2, 2.2)]

    def test_a_step_logged_again_at_the_fork_is_the_newer(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "metrics", rows=rows(1, 2, 3)))
        lab.spool(attempt, event(3, "generation", 2, fork_step=2), generation=2)
        lab.spool(attempt, event(4, "metrics", 2, rows=rows(2, 3, offset=0.5)), generation=2)
        assert steps_of(lab, trial.id) == [(1, 1.0), (2, 2.5), (3, 3.5)]

    def test_a_command_that_starts_over_replaces_what_it_logged(self, lab: Lab) -> None:
        trial, first = lab.run()
        lab.spool(first, event(2, "metrics", rows=rows(1, 2, 3)))
        lab.end(first, Outcome.VANISHED, S.QUEUED)
        lab.clean(first)
        second = lab.begin(trial)
        lab.spool(second, event(1, "started"))
        assert len(steps_of(lab, trial.id)) == 3  # nothing new yet: what is known stays
        lab.spool(second, event(2, "metrics", rows=rows(1, 2, offset=0.5)))
        assert steps_of(lab, trial.id) == [(1, 1.5), (2, 2.5)]

    def test_pages_cover_a_forked_lineage_once(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "metrics", rows=rows(*range(20)) + rows(*range(20), key="a.b")))
        lab.spool(attempt, event(3, "generation", 2, fork_step=9), generation=2)
        lab.spool(attempt, event(4, "metrics", 2, rows=rows(*range(9, 15), offset=0.5)), generation=2)
        seen: list[tuple[str, int]] = []
        cursor = None
        while True:
            with lab.store.read() as conn:
                page = metrics.points(conn, trial.id, after=cursor, limit=4)
            seen += [(point.key, point.step) for point in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert seen == [("a.b", step) for step in range(10)] + [("loss", step) for step in range(15)]

    def test_a_cursor_that_is_none(self, lab: Lab) -> None:
        trial = lab.trial()
        for cursor in ("x", "1.2", "a.b.c.d"):
            with pytest.raises(BadInputError), lab.store.read() as conn:
                metrics.points(conn, trial.id, after=cursor)


class TestObjective:
    def value(self, lab: Lab, *values: Any, reduce: str = "best", mode: str = "max") -> Any:
        objective = Objective.model_validate({"metric": "m", "mode": mode, "reduce": reduce})
        trial, attempt = lab.run({"values": repr(values)}, experiment=f"{reduce}-{mode}", objective=objective)
        sent = [event(seq, "report", step=seq, values={"m": value}) for seq, value in enumerate(values, start=2)]
        lab.spool(attempt, *sent)
        with lab.store.read() as conn:
            reading = metrics.reduce(conn, trial.id, objective)
        assert lab.get(trial.id).value == reading.value
        lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
        lab.clean(attempt)
        return reading

    def test_best_and_last(self, lab: Lab) -> None:
        assert self.value(lab, 1.0, 3.0, 2.0).value == 3.0
        assert self.value(lab, 1.0, 3.0, 2.0, mode="min").value == 1.0
        assert self.value(lab, 1.0, 3.0, 2.0, reduce="last").value == 2.0

    def test_what_is_no_finite_number(self, lab: Lab) -> None:
        for bad in ("nan", "inf", "-inf", None, "high", 10**400, [1.0]):
            reading = self.value(lab, bad)
            assert (reading.reported, reading.value) == (True, None)
            assert reading.text
        assert self.value(lab, 1.0, "nan", reduce="last").value is None
        assert self.value(lab, 1.0, "nan", mode="min").value == 1.0

    def test_never_reported(self, lab: Lab) -> None:
        assert not self.value(lab).reported

    def test_a_value_beyond_the_fork_is_taken_back(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "report", step=1, values={"accuracy": 0.5}))
        lab.spool(attempt, event(3, "report", step=9, values={"accuracy": 0.9}))
        assert lab.get(trial.id).value == 0.9
        lab.spool(attempt, event(4, "generation", 2, fork_step=5), generation=2)
        assert lab.get(trial.id).value == 0.5

    def test_a_metric_of_that_name_counts_too(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "metrics", rows=[["accuracy", 1, 0.7, 1.0]]))
        assert lab.get(trial.id).value == 0.7

    def test_leaderboard(self, lab: Lab) -> None:
        node = lab.fleet(num_devices=4)
        for index, value in enumerate((0.1, 0.9, math.nan, 0.5)):
            attempt = lab.begin(lab.trial({"i": index}), index)
            sent = event(2, "report", step=1, values={"accuracy": value if value == value else "nan"})
            lab.spool(attempt, event(1, "started"), sent)
        assert len(node.devices) == 4
        with lab.store.read() as conn:
            board = trials.leaderboard(conn, "digits", 2, lab.now)
        assert [(row.place, row.trial, row.value) for row in board.rows] == [(1, "digits-2", 0.9), (2, "digits-4", 0.5)]


class TestRetries:
    def test_a_new_checkpoint_is_progress_an_old_one_is_not(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.spool(attempt, event(2, "checkpoint", step=5, uri="x", bytes=1))
        lab.end(attempt, Outcome.VANISHED, S.QUEUED)
        lab.clean(attempt)
        attempt = lab.begin(trial)
        lab.spool(attempt, event(1, "started", fork_step=5), event(2, "checkpoint", step=5, uri="y", bytes=1))
        assert lab.get(trial.id).retries_used == 1
        lab.spool(attempt, event(3, "checkpoint", step=6, uri="z", bytes=1))
        assert lab.get(trial.id).retries_used == 0


def test_metrics_repeated_in_any_order_end_the_same(lab: Lab) -> None:
    trial, _ = lab.run()
    older = [("loss", 1, 1.0, 10.0), ("loss", 2, 2.0, 11.0)]
    newer = [("loss", 1, 5.0, 20.0)]
    for batch in (newer, older, older, newer):
        lab.store.write(lambda conn, batch=batch: metrics.append(conn, trial.id, 1, 1, batch))
    assert steps_of(lab, trial.id) == [(1, 5.0), (2, 2.0)]

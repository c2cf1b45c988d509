"""The trial's state machine: no edge but those of the table, no word but the current attempt's."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.core.enums import DirectiveAction, Outcome, TrialState
from overnight.core.errors import IllegalTransitionError, NotFoundError, StaleAttemptError
from overnight.core.states import END_STATES, LIVE_STATES, can_transition
from overnight.store import attempts, events, models, outbox, trials

Lab = Any
S = TrialState

STATES = st.sampled_from(list(TrialState))
STEPS = st.lists(
    st.tuples(
        st.sets(STATES, min_size=1, max_size=4),  # what the writer expects
        STATES,  # where it wants to go
        st.sampled_from([None, -1, 0, 1]),  # the attempt that it speaks for, relative to the current one
    ),
    min_size=1,
    max_size=12,
)


def put(lab: Lab, trial_id: str, state: TrialState) -> None:
    """Puts a trial into a state behind the machine's back."""
    table = models.trials
    lab.store.write(lambda conn: conn.execute(table.update().where(table.c.id == trial_id).values(state=state.value)))


class TestMachine:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(start=STATES, steps=STEPS)
    def test_it_equals_the_table(self, lab: Lab, start: TrialState, steps: list[Any]) -> None:
        trial = lab.trial(experiment="machine", objective=None, key=None, seed=_fresh_seed(lab))
        put(lab, trial.id, start)
        state = start
        with lab.store.read() as conn:
            before_seq = events.last_seq(conn)
        moves: list[tuple[str, str]] = []
        for expected, after, offset in steps:
            attempt = None if offset is None else offset
            if (attempt is not None and attempt != 0) or state not in expected:
                error: type[Exception] | None = StaleAttemptError
            else:
                error = None if can_transition(state, after) else IllegalTransitionError
            found = _try(lab, trial.id, expected, after, attempt)
            assert found is error
            if error is None:
                moves.append((state.value, after.value))
                state = after
        assert lab.get(trial.id).state is state
        with lab.store.read() as conn:
            page = events.page(conn, before_seq, trial_id=trial.id)
        assert [(event.before, event.after) for event in page.items] == moves

    def test_no_such_trial(self, lab: Lab) -> None:
        with pytest.raises(NotFoundError):
            lab.store.write(lambda conn: _transition(conn, lab, "nope", {S.QUEUED}, S.HELD, None))

    def test_one_event_and_one_word_to_mlflow(self, lab: Lab) -> None:
        trial = lab.trial()
        lab.store.write(lambda conn: _transition(conn, lab, trial.id, {S.QUEUED}, S.CANCELLED, None))
        with lab.store.read() as conn:
            event = events.page(conn, trial_id=trial.id).items[-1]
            told = outbox.pending(conn)[-1]
        assert (event.kind, event.actor, event.before, event.after, event.cause) == (
            "trial.state",
            "tester",
            "queued",
            "cancelled",
            "because",
        )
        assert (told.kind, told.data["state"]) == ("status", "cancelled")


_seeds = iter(range(10**9))


def _fresh_seed(lab: Lab) -> int:
    return next(_seeds)


def _transition(
    conn: Any, lab: Lab, trial_id: str, expected: Any, after: TrialState, attempt: int | None
) -> TrialState:
    return trials.transition(
        conn,
        trial_id=trial_id,
        expected=expected,
        after=after,
        attempt=attempt,
        actor="tester",
        cause="because",
        now=lab.now,
    )


def _try(lab: Lab, trial_id: str, expected: Any, after: TrialState, attempt: int | None) -> type[Exception] | None:
    try:
        lab.store.write(lambda conn: _transition(conn, lab, trial_id, expected, after, attempt))
    except (StaleAttemptError, IllegalTransitionError) as error:
        return type(error)
    return None


class TestStopping:
    def verb(self, lab: Lab, verb: Any, trial: Any, **more: Any) -> Any:
        return lab.store.write(
            lambda conn: verb(conn, trial_id=trial.id, actor="me", reason="enough", now=lab.now, **more)
        )

    def test_a_queued_trial_is_cancelled_at_once(self, lab: Lab) -> None:
        trial = lab.trial()
        assert self.verb(lab, trials.cancel, trial) is S.CANCELLED
        assert self.verb(lab, trials.cancel, trial) is S.CANCELLED
        found = lab.get(trial.id)
        assert (found.state, found.state_cause) == (S.CANCELLED, "enough")
        assert found.ended_at is not None

    def test_a_running_one_is_told_to_stop(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        assert self.verb(lab, trials.cancel, trial, grace_seconds=5.0) is S.STOPPING
        assert self.verb(lab, trials.cancel, trial, grace_seconds=5.0) is S.STOPPING
        with lab.store.read() as conn:
            told = attempts.directive(conn, attempt.id)
        assert (told.action, told.reason, told.grace_seconds, told.version) == (
            DirectiveAction.STOP,
            "cancelled",
            5.0,
            1,
        )

    def test_a_cancel_overrules_a_prune_but_not_the_other_way_round(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        self.verb(lab, trials.prune, trial)
        self.verb(lab, trials.cancel, trial)
        self.verb(lab, trials.prune, trial)
        with lab.store.read() as conn:
            assert attempts.directive(conn, attempt.id).reason == "cancelled"

    def test_what_has_ended_cannot_be_cancelled(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
        with pytest.raises(IllegalTransitionError):
            self.verb(lab, trials.cancel, trial)

    def test_a_yielding_one_can_still_be_cancelled(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.store.write(
            lambda conn: trials.preempt(conn, trial_id=trial.id, attempt=1, actor="s", cause="urgent", now=lab.now)
        )
        with lab.store.read() as conn:
            assert attempts.directive(conn, attempt.id).action is DirectiveAction.YIELD
        assert self.verb(lab, trials.cancel, trial) is S.STOPPING
        with lab.store.read() as conn:
            assert attempts.directive(conn, attempt.id).version == 2

    def test_a_preemption_of_another_attempt_is_stale(self, lab: Lab) -> None:
        trial, _ = lab.run()
        with pytest.raises(StaleAttemptError):
            lab.store.write(
                lambda conn: trials.preempt(conn, trial_id=trial.id, attempt=2, actor="s", cause="x", now=lab.now)
            )


class TestQueue:
    def order(self, lab: Lab) -> list[str]:
        with lab.store.read() as conn:
            found = trials.queue(conn)
            assert [trials.get(conn, trial.id).position for trial in found] == [trial.position for trial in found]
            assert [trial.id for trial in trials.schedulable(conn)] == [trial.id for trial in found]
        return [trial.name for trial in found]

    def test_class_then_rank_then_age(self, lab: Lab) -> None:
        lab.trial({"i": 1}, priority="exploratory", rank=9)
        lab.trial({"i": 2})
        lab.trial({"i": 3}, rank=1)
        lab.trial({"i": 4}, priority="urgent")
        lab.trial({"i": 5})
        assert self.order(lab) == ["digits-4", "digits-3", "digits-2", "digits-5", "digits-1"]

    def test_a_preempted_trial_keeps_its_place(self, lab: Lab) -> None:
        first, attempt = lab.run({"i": 1})
        lab.trial({"i": 2})
        lab.end(attempt, Outcome.PREEMPTED, S.QUEUED)
        assert self.order(lab) == ["digits-1", "digits-2"]
        found = lab.get(first.id)
        assert (found.preemptions, found.retries_used) == (1, 0)

    def test_held_and_released_at_its_old_place(self, lab: Lab) -> None:
        first = lab.trial({"i": 1})
        lab.trial({"i": 2})
        for verb, expected in ((trials.hold, ["digits-2"]), (trials.unhold, ["digits-1", "digits-2"])):
            for _ in range(2):
                lab.store.write(
                    lambda conn, verb=verb: verb(conn, trial_id=first.id, actor="me", reason="", now=lab.now)
                )
            assert self.order(lab) == expected

    def test_a_running_trial_cannot_be_held(self, lab: Lab) -> None:
        trial, _ = lab.run()
        with pytest.raises(IllegalTransitionError):
            lab.store.write(lambda conn: trials.hold(conn, trial_id=trial.id, actor="me", reason="", now=lab.now))

    def test_what_a_trial_is_refused_comes_with_what_it_allows(self, lab: Lab) -> None:
        def hint_of(verb: Callable[..., Any]) -> str:
            with pytest.raises(IllegalTransitionError) as caught:
                lab.store.write(lambda conn: verb(conn, trial_id=trial.id, actor="me", reason="", now=lab.now))
            return str(caught.value.hint)

        trial, attempt = lab.run()
        assert "overnight cancel digits-1" in hint_of(trials.hold) == hint_of(trials.bump)
        lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
        assert "overnight rerun digits-1" in hint_of(trials.unhold) == hint_of(trials.bump)
        trial = lab.trial({"lr": 2})
        lab.store.write(lambda conn: trials.hold(conn, trial_id=trial.id, actor="me", reason="", now=lab.now))
        with pytest.raises(IllegalTransitionError) as caught:
            lab.store.write(
                lambda conn: trials.transition(
                    conn, trial_id=trial.id, expected={S.HELD}, after=S.RUNNING, actor="me", cause="", now=lab.now
                )
            )
        assert "overnight unhold digits-2" in caught.value.hint

    def test_bump_passes_its_class_only(self, lab: Lab) -> None:
        lab.trial({"i": 1}, priority="urgent")
        lab.trial({"i": 2}, rank=3)
        late = lab.trial({"i": 3})
        for _ in range(2):
            rank = lab.store.write(lambda conn: trials.bump(conn, trial_id=late.id, actor="me", reason="", now=lab.now))
        assert rank == 4
        assert self.order(lab) == ["digits-1", "digits-3", "digits-2"]

    def test_a_rerun_goes_to_the_end_with_fresh_retries(self, lab: Lab) -> None:
        first, attempt = lab.run({"i": 1})
        lab.trial({"i": 2})
        lab.end(attempt, Outcome.VANISHED, S.QUEUED)
        lab.clean(attempt)
        again = lab.begin(first)
        lab.end(again, Outcome.USER_ERROR, S.FAILED)
        assert lab.get(first.id).retries_used == 1
        lab.store.write(lambda conn: trials.rerun(conn, trial_id=first.id, actor="me", reason="", now=lab.now))
        assert self.order(lab) == ["digits-2", "digits-1"]
        found = lab.get(first.id)
        assert (found.retries_used, found.error, found.ended_at, found.attempts_made) == (0, None, None, 2)
        with pytest.raises(IllegalTransitionError):
            lab.store.write(lambda conn: trials.rerun(conn, trial_id=first.id, actor="me", reason="", now=lab.now))

    def test_pages_walk_all_trials_newest_first_while_more_come(self, lab: Lab) -> None:
        for index in range(7):
            lab.trial({"i": index})
        seen: list[int] = []
        cursor = None
        while True:
            with lab.store.read() as conn:
                page = trials.page(conn, trials.TrialFilter(experiment="digits"), cursor, limit=3)
            seen += [trial.number for trial in page.items]
            lab.trial({"late": len(seen)})
            cursor = page.cursor
            if cursor is None:
                break
        assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_states_are_partitioned() -> None:
    assert set(TrialState) == END_STATES | LIVE_STATES | {S.HELD, S.QUEUED}

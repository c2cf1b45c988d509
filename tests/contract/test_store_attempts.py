"""Attempts and leases: a device is never leased twice, and a stale word changes nothing."""

import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from overnight.core.clock import SystemClock
from overnight.core.enums import DeviceState, DirectiveAction, LeaseState, Outcome, TrialState
from overnight.core.errors import ConflictError, NotFoundError, OvernightError, StaleAttemptError
from overnight.core.ids import new_id
from overnight.core.models.api import Attempt, Trial, TrialError
from overnight.store import attempts, devices, events, models, trials
from overnight.store.engine import Store

Lab = Any
S = TrialState


def set_device(lab: Lab, device_id: str, state: DeviceState) -> None:
    lab.store.write(
        lambda conn: devices.set_state(
            conn, device_id=device_id, state=state, cause="test", now=lab.now, actor="tester"
        )
    )


class TestBegin:
    def test_intent_is_whole(self, lab: Lab) -> None:
        trial = lab.trial()
        attempt = lab.begin(trial, 0, 1)
        assert (attempt.number, attempt.generation, attempt.lease_state) == (1, 1, LeaseState.ACTIVE)
        found = lab.get(trial.id)
        assert (found.state, found.attempts_made, found.devices) == (S.STARTING, 1, ("box:0", "box:1"))
        assert found.attempts == (attempt,)
        with lab.store.read() as conn:
            [live] = attempts.live(conn)
            assert (live.id, live.device_ids, live.directive.version) == (attempt.id, attempt.devices, 0)
            held = {device.id: (device.trial_name, device.attempt_id) for device in devices.list_(conn)}
            assert held == {"box:0": ("digits-1", attempt.id), "box:1": ("digits-1", attempt.id)}
            assert events.page(conn, trial_id=trial.id).items[-1].data["devices"] == ["box:0", "box:1"]

    def test_a_leased_device_is_refused_and_nothing_is_left(self, lab: Lab) -> None:
        lab.begin(lab.trial({"i": 1}), 0)
        second = lab.trial({"i": 2})
        with pytest.raises(ConflictError):
            lab.begin(second, 1, 0)
        assert lab.get(second.id).state is S.QUEUED
        with lab.store.read() as conn:
            assert len(attempts.live(conn)) == 1
            assert attempts.of_trial(conn, second.id) == []
        lab.begin(second, 1)

    def test_a_device_out_of_service_is_refused(self, lab: Lab) -> None:
        lab.fleet()
        trial = lab.trial()
        for state in (DeviceState.QUARANTINED, DeviceState.DRAINING, DeviceState.BUSY, DeviceState.LOST):
            set_device(lab, "box:0", state)
            with pytest.raises(ConflictError, match=state.value):
                lab.begin(trial, 0)

    def test_an_unknown_device(self, lab: Lab) -> None:
        trial, node = lab.trial(), lab.fleet()
        with pytest.raises(NotFoundError):
            lab.store.write(lambda conn: self.begin(conn, lab, trial, node.id, ["box:7"]))

    def test_no_device_or_one_twice(self, lab: Lab) -> None:
        trial, node = lab.trial(), lab.fleet()
        for device_ids in ([], ["box:0", "box:0"]):
            with pytest.raises(ConflictError):
                lab.store.write(partial(self.begin, lab=lab, trial=trial, node_id=node.id, device_ids=device_ids))

    def begin(self, conn: sa.Connection, lab: Lab, trial: Trial, node_id: str, device_ids: list[str]) -> Attempt:
        return attempts.begin(
            conn,
            ids=new_id,
            now=lab.now,
            trial_id=trial.id,
            expected_attempt=0,
            node_id=node_id,
            device_ids=device_ids,
            cause="",
        )

    def test_two_schedulers_cannot_start_a_trial_twice_or_share_a_device(self, store_url: str, lab: Lab) -> None:
        """Two processes race for the same trials and devices, as two schedulers would after a split."""
        node = lab.fleet(num_devices=3)
        made = [lab.trial({"i": index}) for index in range(12)]
        refused: list[OvernightError] = []

        def race(store: Store, order: list[Trial]) -> None:
            for index, trial in enumerate(order):
                device = node.devices[index % 3]
                try:
                    store.write(partial(self.begin, lab=lab, trial=trial, node_id=node.id, device_ids=[device]))
                except (ConflictError, NotFoundError) as error:
                    refused.append(error)

        with Store.open(store_url, SystemClock(), migrate=False) as other:
            threads = [
                threading.Thread(target=race, args=(store, order))
                for store, order in ((lab.store, made), (other, made[::-1]))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        with lab.store.read() as conn:
            live = attempts.live(conn)
        assert len(live) == 3
        assert sorted(attempt.device_ids for attempt in live) == [("box:0",), ("box:1",), ("box:2",)]
        assert len(refused) == 24 - 3

    def test_the_index_itself_refuses_a_second_live_lease(self, lab: Lab) -> None:
        first = lab.begin(lab.trial({"i": 1}), 0)
        second = lab.begin(lab.trial({"i": 2}), 1)
        row = {"attempt_id": second.id, "device_id": "box:0", "clean": 0}
        with pytest.raises(ConflictError):
            lab.store.write(lambda conn: conn.execute(models.lease_devices.insert(), row))
        assert first.devices == ("box:0",)


class TestEnd:
    def test_outcomes(self, lab: Lab) -> None:
        table: list[tuple[Outcome, TrialState, int, int]] = [
            (Outcome.COMPLETED, S.COMPLETED, 0, 0),
            (Outcome.PRUNED, S.PRUNED, 0, 0),
            (Outcome.CANCELLED, S.CANCELLED, 0, 0),
            (Outcome.PREEMPTED, S.QUEUED, 0, 1),
            (Outcome.USER_ERROR, S.FAILED, 0, 0),
            (Outcome.OUT_OF_MEMORY, S.FAILED, 0, 0),
            (Outcome.INFRA_FAULT, S.QUEUED, 1, 0),
            (Outcome.VANISHED, S.QUEUED, 1, 0),
            (Outcome.VANISHED, S.FAILED, 0, 0),
        ]
        for row, (outcome, after, retries, preemptions) in enumerate(table):
            trial, attempt = lab.run({"row": row})
            error = TrialError(type="E", message="[/bold]\x00", last_lines=("a", "b")) if after is S.FAILED else None
            not_before = lab.now + timedelta(seconds=60) if retries else None
            lab.end(attempt, outcome, after, exit_codes=[0, -9, None], error=error, not_before=not_before)
            found = lab.get(trial.id)
            assert (found.state, found.retries_used, found.preemptions) == (after, retries, preemptions)
            assert (found.error, found.ended_at is not None) == (error, after is not S.QUEUED)
            [ended] = found.attempts
            assert (ended.outcome, ended.exit_codes, ended.error) == (outcome, (0, -9, None), error)
            assert ended.lease_state is LeaseState.RELEASING
            with lab.store.read() as conn:
                waiting = trials.schedulable(conn, [trial.id])
            assert [w.not_before for w in waiting] == ([not_before] if after is S.QUEUED else [])
            lab.clean(attempt)

    def test_only_the_first_word_counts(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        lab.end(attempt, Outcome.VANISHED, S.QUEUED)
        with pytest.raises(StaleAttemptError):
            lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
        assert lab.get(trial.id).state is S.QUEUED

    def test_a_device_is_leased_again_only_when_clean(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        with pytest.raises(ConflictError, match="not ended"):
            lab.clean(attempt)
        lab.end(attempt, Outcome.VANISHED, S.QUEUED)
        with pytest.raises(ConflictError, match="leased"):
            lab.begin(trial, 0)
        assert lab.clean(attempt)
        assert not lab.clean(attempt)
        again = lab.begin(trial, 0)
        assert again.number == 2
        with lab.store.read() as conn:
            assert [live.id for live in attempts.live(conn)] == [again.id]

    def test_a_device_that_broke_meanwhile_is_not(self, lab: Lab) -> None:
        trial, attempt = lab.run()
        set_device(lab, "box:0", DeviceState.QUARANTINED)
        lab.end(attempt, Outcome.INFRA_FAULT, S.QUEUED)
        lab.clean(attempt)
        with pytest.raises(ConflictError, match="quarantined"):
            lab.begin(trial, 0)


class TestDirectives:
    def test_the_same_words_again_are_not_new(self, lab: Lab) -> None:
        _, attempt = lab.run()

        def tell(reason: str) -> int:
            found = lab.store.write(
                lambda conn: attempts.set_directive(
                    conn, attempt_id=attempt.id, action=DirectiveAction.YIELD, reason=reason
                )
            )
            return int(found.version)

        assert [tell("a"), tell("a"), tell("b")] == [1, 1, 2]

    def test_heartbeats_are_kept(self, lab: Lab) -> None:
        _, attempt = lab.run()
        lab.store.write(lambda conn: attempts.beat(conn, attempt.id, 42))
        with lab.store.read() as conn:
            assert attempts.live(conn)[0].heartbeat == 42

    def test_an_unknown_attempt(self, lab: Lab) -> None:
        with lab.store.read() as conn:
            for look in (attempts.get, attempts.directive):
                with pytest.raises(NotFoundError):
                    look(conn, "nope")


class LeaseMachine(RuleBasedStateMachine):
    """Random schedulers, nodes and people on three devices; what they may never do is checked after each step."""

    lab: Lab

    def __init__(self) -> None:
        super().__init__()
        self.lab.fleet(num_devices=3, name=f"n{new_id('node')}")
        self.trials: list[Trial] = []
        self.attempts: list[Attempt] = []

    def attempted(self, action: Any) -> None:
        try:
            action()
        except (ConflictError, NotFoundError):
            return

    @rule()
    def submit(self) -> None:
        self.trials.append(self.lab.trial({"id": new_id("trial")}, experiment="leases", objective=None))

    @precondition(lambda self: self.trials)
    @rule(data=st.data(), chosen=st.sets(st.integers(0, 2), min_size=1))
    def begin(self, data: st.DataObject, chosen: set[int]) -> None:
        trial = data.draw(st.sampled_from(self.trials))
        self.attempted(lambda: self.attempts.append(self.lab.begin(trial, *sorted(chosen))))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), end=st.sampled_from([(Outcome.PREEMPTED, S.QUEUED), (Outcome.COMPLETED, S.COMPLETED)]))
    def end(self, data: st.DataObject, end: tuple[Outcome, TrialState]) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        self.attempted(lambda: self.lab.end(attempt, *end))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def clean(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        self.attempted(lambda: self.lab.clean(attempt))

    @precondition(lambda self: self.trials)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        trial = data.draw(st.sampled_from(self.trials))
        lab = self.lab
        self.attempted(
            lambda: lab.store.write(
                lambda conn: trials.cancel(conn, trial_id=trial.id, actor="me", reason="", now=lab.now)
            )
        )

    @invariant()
    def leases_are_disjoint_and_live_trials_hold_one(self) -> None:
        with self.lab.store.read() as conn:
            live = attempts.live(conn)
            running = [trial for trial in trials.schedulable(conn) if trial.state is not S.QUEUED]
        held = [device for attempt in live for device in attempt.device_ids]
        assert len(held) == len(set(held))
        unended = [(attempt.trial_id, attempt.number) for attempt in live if attempt.ended_at is None]
        assert sorted(unended) == sorted((trial.id, trial.attempts_made) for trial in running)


def test_leases_under_random_schedules(sqlite_lab: Lab) -> None:
    machine = type("Machine", (LeaseMachine,), {"lab": sqlite_lab})
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=6, stateful_step_count=20, deadline=None, suppress_health_check=checks)
    )

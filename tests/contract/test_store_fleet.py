"""Nodes, devices, sweeps, events, the outbox and the leader's row."""

from datetime import timedelta
from typing import Any

import pytest

from overnight.core.enums import DeviceState, Outcome, SweepState, TrialState
from overnight.core.errors import ConflictError, KeyReusedError, NotFoundError
from overnight.core.ids import new_id
from overnight.core.models.api import SweepIn
from overnight.core.models.node import DeviceReport, NodeHello
from overnight.core.models.spec import SweepConfig
from overnight.store import devices, events, experiments, leaders, nodes, outbox, sweeps, trials

Lab = Any


class TestNodes:
    def test_a_node_comes_again_with_its_devices_and_their_states(self, lab: Lab) -> None:
        first = lab.fleet(num_devices=2)
        lab.store.write(
            lambda conn: devices.set_state(
                conn, device_id="box:1", state=DeviceState.QUARANTINED, cause="xid 79", now=lab.now, actor="health"
            )
        )
        again = lab.fleet(num_devices=3)
        assert (again.id, again.devices) == (first.id, ("box:0", "box:1", "box:2"))
        with lab.store.read() as conn:
            assert [device.state for device in devices.list_(conn, first.id)] == ["healthy", "quarantined", "healthy"]
            kinds = [event.kind for event in events.page(conn).items if event.subject == "box"]
        assert kinds == ["node.connected"]  # the same daemon again is no news

    def test_silence_and_return_are_news_once(self, lab: Lab) -> None:
        node = lab.fleet()
        heard = [
            lab.store.write(lambda conn: nodes.disconnect(conn, node_id=node.id, cause="silent", now=lab.now))
            for _ in range(2)
        ]
        assert heard == [True, False]
        with lab.store.read() as conn:
            assert not nodes.get(conn, "box").connected
        for _ in range(2):
            lab.store.write(lambda conn: nodes.seen(conn, node_id=node.id, now=lab.now))
        with lab.store.read() as conn:
            assert nodes.get(conn, node.id).connected
            kinds = [event.kind for event in events.page(conn).items if event.subject == "box"]
        assert kinds == ["node.connected", "node.silent", "node.connected"]

    def test_a_name_becomes_part_of_a_url(self, lab: Lab) -> None:
        fits = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        report = DeviceReport(index=0, kind="k\x00", type="t" * 500, memory_bytes=2**62, uuid="\x00")
        for name in ("../x", "a/b?c", "\x00", "[/bold]", "ü" * 300, "http://x"):
            hello = NodeHello(name=name, pid=1, boot_id="b\x00", version="1", devices=(report,))
            node = lab.store.write(lambda conn, hello=hello: nodes.hello(conn, ids=new_id, now=lab.now, hello=hello))
            assert node.name
            assert set(node.name) <= fits
            assert node.devices == (f"{node.name}:0",)

    def test_an_unknown_node(self, lab: Lab) -> None:
        with pytest.raises(NotFoundError):
            lab.store.write(lambda conn: nodes.seen(conn, node_id="nope", now=lab.now))


class TestDevices:
    def test_a_change_is_one_event_and_no_change_none(self, lab: Lab) -> None:
        lab.fleet()
        until = lab.now + timedelta(hours=1)

        def change(cause: str, **more: Any) -> Any:
            return lab.store.write(
                lambda conn: devices.set_state(
                    conn,
                    device_id="box:0",
                    state=DeviceState.SUSPECT,
                    cause=cause,
                    now=lab.now,
                    actor="health",
                    until=until,
                    evidence={"xid": 13},
                    **more,
                )
            )

        assert [change("a"), change("a"), change("b")] == [True, False, True]
        with pytest.raises(ConflictError, match="suspect"):
            change("c", expected={DeviceState.HEALTHY})
        with lab.store.read() as conn:
            device = devices.get(conn, "box:0")
            changes = [e.cause for e in events.page(conn, kinds=["device.state"]).items if e.subject == "box:0"]
        assert (device.state, device.cause, device.until) == (DeviceState.SUSPECT, "b", until)
        assert changes == ["first seen", "a", "b"]

    def test_facts_that_change_are_recorded(self, lab: Lab) -> None:
        node = lab.fleet(num_devices=1)
        swapped = DeviceReport(index=0, kind="fake", type="h100", memory_bytes=1, uuid="new")
        for _ in range(2):
            lab.store.write(lambda conn: devices.upsert(conn, node_id=node.id, reports=[swapped], now=lab.now))
        with lab.store.read() as conn:
            assert devices.get(conn, "box:0").type == "h100"
            assert len(events.page(conn, kinds=["device.changed"]).items) == 1


class TestSweeps:
    def sweep(self, lab: Lab, **fields: Any) -> SweepIn:
        space = {"lr": {"kind": "log", "low": 1e-4, "high": 1.0}}
        config = SweepConfig.model_validate({"space": space, "trials": fields.pop("trials", 20)})
        return SweepIn(config=lab.proposal().config, sweep=config, **fields)

    def add(self, lab: Lab, **fields: Any) -> Any:
        parent = fields.pop("parent_id", None)
        asked = self.sweep(lab, **fields)
        return lab.store.write(
            lambda conn: sweeps.add(conn, ids=new_id, now=lab.now, actor="me", sweep=asked, parent_id=parent)
        )

    def test_its_key(self, lab: Lab) -> None:
        first = self.add(lab, key="k")
        assert self.add(lab, key="k") == first
        with pytest.raises(KeyReusedError):
            self.add(lab, key="k", trials=21)

    def test_states_and_lists(self, lab: Lab) -> None:
        registered = self.add(lab, schedule={"cron": "0 22 * * *"})
        run = self.add(lab, parent_id=registered.id)

        def stop(sweep_id: str = run.id) -> Any:
            return lab.store.write(
                lambda conn: sweeps.set_state(
                    conn,
                    sweep_id=sweep_id,
                    state=SweepState.STOPPED,
                    cause="enough",
                    now=lab.now,
                    actor="me",
                    expected={SweepState.ACTIVE},
                )
            )

        assert [stop(), stop()] == [True, False]
        with pytest.raises(NotFoundError, match="no sweep 'swp-nope'") as caught:
            stop("swp-nope")
        assert "overnight sweep --list" in caught.value.hint
        soon = lab.now + timedelta(hours=1)
        lab.store.write(lambda conn: sweeps.set_next_run(conn, registered.id, soon))
        with lab.store.read() as conn:
            assert [s.id for s in sweeps.list_(conn, states={SweepState.ACTIVE})] == [registered.id]
            assert [(s.id, s.state, s.cause) for s in sweeps.list_(conn, parent_id=registered.id)] == [
                (run.id, SweepState.STOPPED, "enough")
            ]
            assert sweeps.get(conn, registered.id).next_run_at == soon

    def test_what_planners_see(self, lab: Lab) -> None:
        sweep = self.add(lab)
        lab.fleet(num_devices=2)
        trial = lab.trial({"lr": 0.1}, sweep_id=sweep.id)
        lab.trial({"lr": 0.2}, sweep_id=sweep.id)
        lab.trial({"lr": 0.3})
        attempt = lab.begin(trial, 0, 1)
        lab.store.write(lambda conn: trials.set_value(conn, trial.id, 0.5))
        lab.end(attempt, Outcome.PRUNED, TrialState.PRUNED)
        with lab.store.read() as conn:
            found = sweeps.trials_of(conn, sweep.id)
            wire = sweeps.get(conn, sweep.id)
            seconds = sweeps.device_seconds(conn, sweep.id, lab.now + timedelta(seconds=100))
        assert [(t.params["lr"], t.state, t.value) for t in found] == [(0.1, "pruned", 0.5), (0.2, "queued", None)]
        assert wire.best is not None
        assert (wire.best.value, wire.proposed) == (0.5, 2)
        assert 200 <= seconds < 230

    def test_an_unknown_sweep(self, lab: Lab) -> None:
        with pytest.raises(NotFoundError), lab.store.read() as conn:
            sweeps.get(conn, "nope")


class TestLeaders:
    def acquire(self, lab: Lab, holder: str, seen: leaders.Leader | None) -> Any:
        return lab.store.write(lambda conn: leaders.acquire(conn, holder=holder, now=lab.now, seen=seen))

    def read(self, lab: Lab) -> Any:
        with lab.store.read() as conn:
            return leaders.read(conn)

    def renew(self, lab: Lab, holder: str) -> Any:
        return lab.store.write(lambda conn: leaders.renew(conn, holder=holder, now=lab.now))

    def test_the_first_one_gets_it(self, lab: Lab) -> None:
        assert self.acquire(lab, "a", None)
        assert not self.acquire(lab, "b", None)
        assert self.acquire(lab, "a", None)

    def test_a_living_one_keeps_it(self, lab: Lab) -> None:
        self.acquire(lab, "a", None)
        seen = self.read(lab)
        assert self.renew(lab, "a")
        assert not self.acquire(lab, "b", seen)
        assert self.renew(lab, "a")

    def test_a_dead_one_loses_it_to_exactly_one(self, lab: Lab) -> None:
        self.acquire(lab, "a", None)
        seen = self.read(lab)
        assert [self.acquire(lab, holder, seen) for holder in ("b", "c")] == [True, False]
        assert [self.renew(lab, holder) for holder in ("a", "b", "c")] == [False, True, False]

    def test_given_up(self, lab: Lab) -> None:
        self.acquire(lab, "a", None)
        lab.store.write(lambda conn: leaders.release(conn, holder="b"))
        assert self.read(lab).holder == "a"
        lab.store.write(lambda conn: leaders.release(conn, holder="a"))
        assert self.read(lab) is None


class TestOutbox:
    def test_rows_stay_in_order_until_they_are_done(self, lab: Lab) -> None:
        made = [lab.trial({"i": index}) for index in range(5)]
        with lab.store.read() as conn:
            rows = outbox.pending(conn, limit=3)
            assert [row.trial_id for row in rows] == [trial.id for trial in made[:3]]
            assert [row.trial_id for row in outbox.pending(conn, after=rows[-1].seq)] == [t.id for t in made[3:]]
        lab.store.write(lambda conn: outbox.done(conn, rows[1].seq))
        lab.store.write(lambda conn: outbox.remove(conn, [rows[2].seq]))
        with lab.store.read() as conn:
            assert outbox.lag(conn) == 2


class TestExperiments:
    def test_best_and_counts(self, lab: Lab) -> None:
        made = [lab.trial({"i": index}) for index in range(3)]
        for trial, value in zip(made, (0.1, 0.9, None), strict=True):
            lab.store.write(lambda conn, t=trial, v=value: trials.set_value(conn, t.id, v))
        lab.store.write(lambda conn: experiments.set_mlflow_id(conn, experiments.get(conn, "digits").id, "7"))
        with lab.store.read() as conn:
            [found] = experiments.list_(conn)
            assert experiments.to_wire(conn, experiments.get(conn, found.id)) == found
        assert found.best is not None
        assert (found.best.name, found.trials_by_state, found.mlflow_experiment_id) == (
            "digits-2",
            {TrialState.QUEUED: 3},
            "7",
        )

    def test_another_objective(self, lab: Lab) -> None:
        lab.trial()
        other = lab.proposal(objective={"metric": "loss"}).config.objective
        with pytest.raises(ConflictError, match="max accuracy"):
            lab.store.write(lambda conn: experiments.ensure(conn, new_id, lab.now, "digits", other))

    def test_pages_of_events(self, lab: Lab) -> None:
        for index in range(3):
            lab.trial({"i": index})
        with lab.store.read() as conn:
            first = events.page(conn, limit=2)
            rest = events.page(conn, int(first.cursor or 0))
            assert [e.seq for e in (*first.items, *rest.items)] == [1, 2, 3, 4]
            assert events.page(conn, 4).cursor is None
            assert events.last_seq(conn) == 4

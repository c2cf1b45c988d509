"""A curve shows what the weights hold: metrics count along the parents of starts, exactly as checkpoints do."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.core.enums import Outcome, TrialState
from overnight.core.ids import new_id
from overnight.core.models.node import SpoolEvent
from overnight.core.models.spec import Objective
from overnight.platform.outbox.lineage import Verdict, judge
from overnight.store import events, lineages, metrics, projection, transitions, trials
from overnight.store.lineages import NOTHING, SCRATCH
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reading.lineage import lineage

Lab = Any
S = TrialState
History = dict[int, Token]


def event(seq: int, kind: str, generation: int = 1, **data: Any) -> SpoolEvent:
    return SpoolEvent.model_validate({"seq": seq, "kind": kind, "generation": generation, "at": 1.0, "data": data})


def fork(seq: int, generation: int, step: int, *parent: Any) -> SpoolEvent:
    """What a trainer tells that goes on from ``step``; of trainers that tell no parent, if none is given."""
    told = {"parent": parent[0]} if parent else {}
    return event(seq, "generation", generation, generation_=generation, fork_step=step, trainer=True, **told)


def losses(seq: int, generation: int, first: int, last: int) -> SpoolEvent:
    """The steps first..last of a generation; the values tell whose they are."""
    rows = [["loss", step, generation * 100.0 + step, float(step)] for step in range(first, last + 1)]
    return event(seq, "metrics", generation, rows=rows)


def whose(lab: Lab, trial_id: str) -> dict[int, tuple[int, int]]:
    """By step: the attempt and generation that counts."""
    with lab.store.read() as conn:
        return {p.step: (p.attempt, p.generation) for p in metrics.points(conn, trial_id, "loss").items}


def limits(lab: Lab, trial_id: str) -> list[int | None]:
    with lab.store.read() as conn:
        return [token.until_step for token in lineages.tokens(conn, trial_id)]


def test_a_late_commit_of_an_older_start_is_what_the_next_one_goes_on_from(lab: Lab) -> None:
    """Generation 2 went on at 10 and died before it committed; generation 1 had published 15 at the last moment."""
    trial, attempt = lab.run()
    lab.spool(attempt, fork(2, 1, 0, None), losses(3, 1, 1, 15))
    lab.spool(attempt, fork(4, 2, 10, [1, 1]), losses(5, 2, 11, 14), generation=2)
    assert whose(lab, trial.id) == {s: (1, 1) for s in range(1, 11)} | {s: (1, 2) for s in range(11, 15)}
    lab.spool(attempt, fork(6, 3, 15, [1, 1]), losses(7, 3, 16, 17), generation=3)
    assert whose(lab, trial.id) == {s: (1, 1) for s in range(1, 16)} | {16: (1, 3), 17: (1, 3)}
    assert limits(lab, trial.id) == [15, NOTHING, None]


def test_a_start_that_committed_hides_a_late_commit(lab: Lab) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, fork(2, 1, 0, None), losses(3, 1, 1, 20))
    lab.spool(attempt, fork(4, 2, 10, [1, 1]), losses(5, 2, 11, 14), generation=2)
    lab.spool(attempt, fork(6, 3, 12, [1, 2]), losses(7, 3, 13, 13), generation=3)
    assert limits(lab, trial.id) == [10, 12, None]
    assert [whose(lab, trial.id)[step] for step in (10, 11, 12, 13)] == [(1, 1), (1, 2), (1, 2), (1, 3)]


def test_a_start_from_scratch_leaves_nothing_of_older_ones(lab: Lab) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, losses(2, 1, 0, 5))
    lab.spool(attempt, fork(3, 2, 0, None), losses(4, 2, 1, 2), generation=2)
    assert whose(lab, trial.id) == {1: (1, 2), 2: (1, 2)}


def test_trainers_that_tell_no_parent_keep_the_rule_by_steps(lab: Lab) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, losses(2, 1, 1, 15))
    lab.spool(attempt, fork(3, 2, 10), losses(4, 2, 11, 14), generation=2)
    lab.spool(attempt, fork(5, 3, 15), losses(6, 3, 16, 16), generation=3)
    assert limits(lab, trial.id) == [10, 15, None]
    assert whose(lab, trial.id)[12] == (1, 2)


def test_a_parent_of_which_nothing_is_known_stands_for_the_newest_before_it(lab: Lab) -> None:
    """Its node was lost before it could tell; its checkpoint was on shared storage."""
    trial, first = lab.run()
    lab.spool(first, losses(2, 1, 1, 20))
    for _ in range(2):
        with lab.store.read() as conn:
            current = trials.get(conn, trial.id).attempts[-1]
        lab.end(current, Outcome.VANISHED, S.QUEUED)
        lab.clean(current)
        third = lab.begin(trial)
    lab.spool(third, event(1, "started"), fork(2, 1, 12, [2, 1]), losses(3, 1, 13, 13))
    assert whose(lab, trial.id) == {s: (1, 1) for s in range(1, 13)} | {13: (3, 1)}


def test_a_fork_told_twice_stays_as_it_was_first_told(lab: Lab) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, fork(2, 2, 4, [1, 1]), fork(3, 2, 9, [1, 2]), event(4, "generation", 2), generation=2)
    with lab.store.read() as conn:
        found = lineages.tokens(conn, trial.id)
    assert [(token.fork_step, token.parent, token.until_step) for token in found] == [
        (None, None, 4),
        (4, (1, 1), None),
    ]


@pytest.mark.parametrize("parent", [[1], [1, 2, 3], "12x", [-1, 1], [1, 2**31], [1, None], 7, {"a": 1, "b": 2}])
def test_a_parent_without_sense_is_recorded_and_passed_over(lab: Lab, parent: Any) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, losses(2, 1, 1, 3), fork(3, 2, 1, parent), losses(4, 2, 3, 3), generation=2)
    with lab.store.read() as conn:
        assert [e.data["seq"] for e in events.page(conn, trial_id=trial.id, kinds=["spool.refused"]).items] == [3]
    assert whose(lab, trial.id) == {1: (1, 1), 2: (1, 1), 3: (1, 2)}


def test_the_best_value_is_of_the_lineage(lab: Lab) -> None:
    objective = Objective.model_validate({"metric": "loss", "mode": "max"})
    trial, attempt = lab.run(objective=objective)
    lab.spool(attempt, fork(2, 1, 0, None), losses(3, 1, 1, 15))
    lab.spool(attempt, fork(4, 2, 10, [1, 1]), losses(5, 2, 11, 14), generation=2)
    assert lab.get(trial.id).value == 214.0
    lab.spool(attempt, fork(6, 3, 15, [1, 1]), generation=3)
    assert lab.get(trial.id).value == 115.0


def test_what_was_lost_waits_for_mlflow_until_no_start_can_take_it_up(lab: Lab) -> None:
    trial, attempt = lab.run()
    lab.spool(attempt, fork(2, 1, 0, None), losses(3, 1, 1, 15))
    lab.spool(attempt, event(4, "checkpoint", step=10, uri="c", bytes=1), fork(5, 2, 10, [1, 1]), generation=2)

    def verdict(generation: int, step: int, patient: bool = True) -> Verdict:
        with lab.store.read() as conn:
            return judge(projection.facts(conn, [trial.id])[trial.id], 1, generation, step, patient=patient)

    assert [verdict(1, 10), verdict(1, 12)] == [Verdict.TELL, Verdict.HOLD]
    assert verdict(1, 12, patient=False) is Verdict.DROP
    lab.spool(attempt, event(6, "checkpoint", 1, step=15, uri="d", bytes=1), fork(7, 3, 15, [1, 1]), generation=3)
    assert [verdict(1, 12), verdict(1, 16), verdict(2, 12)] == [Verdict.TELL, Verdict.HOLD, Verdict.HOLD]
    lab.spool(attempt, event(8, "checkpoint", 3, step=18, uri="e", bytes=1), generation=3)
    assert [verdict(1, 12), verdict(1, 16), verdict(2, 12)] == [Verdict.TELL, Verdict.DROP, Verdict.DROP]


# -- against trainings that carry their own history -----------------------------------------------------------------


@dataclass
class Start:
    """One start of a trainer: ``history`` says for each step who computed what its weights hold."""

    token: Token
    step: int
    history: History
    parent: CheckpointName | None
    logged: set[int] = field(default_factory=set)


@dataclass
class World:
    """Starts that go on from real checkpoint places, and zombies among them."""

    place: LocalPlace
    starts: list[Start] = field(default_factory=list)
    saved: dict[CheckpointName, History] = field(default_factory=dict)

    def start(self, in_job: bool) -> None:
        last = self.starts[-1].token if self.starts else Token(0, 0)
        token = Token(last.attempt, last.generation + 1) if in_job and self.starts else Token(last.attempt + 1, 1)
        parent = next(lineage(self.place), None)
        claim(self.place, token, parent)
        history = dict(self.saved[parent]) if parent else {}
        self.starts.append(Start(token, parent.step if parent else 0, history, parent))

    def train(self, one: Start, steps: int, again: bool) -> None:
        """``again``: what is logged at first is of the step at which it went on."""
        first = one.step + (0 if again and not one.logged else 1)
        for step in range(first, one.step + steps + 1):
            one.history[step] = one.token
            one.logged.add(step)
        one.step += steps

    def commit(self, one: Start) -> None:
        """Published whatever came later: it had looked at the fences before."""
        name = CheckpointName(one.step, one.token)
        if name not in self.saved and one.logged:
            self.place.path(name).mkdir()
            self.saved[name] = dict(one.history)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.booleans()),
        st.tuples(st.just("train"), st.integers(0, 3), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("commit"), st.integers(0, 3)),
    ),
    max_size=25,
)


def play(world: World, actions: list[tuple[Any, ...]]) -> None:
    """``train`` and ``commit`` name a start by its age: 0 is the newest one."""
    world.start(False)
    for kind, *args in actions:
        if kind == "start":
            world.start(args[0])
            continue
        one = world.starts[max(0, len(world.starts) - 1 - args[0])]
        if kind == "train":
            world.train(one, *args[1:])
        else:
            world.commit(one)


def store_starts(conn: Any, trial_id: str, world: World, now: Any) -> None:
    for one in world.starts:
        told = one.parent and (one.parent.token.attempt, one.parent.token.generation)
        step = one.parent.step if one.parent else 0
        lineages.record(conn, trial_id, one.token.attempt, one.token.generation, step, now, told or SCRATCH)
        rows = [("loss", step, 1.0, 1.0) for step in sorted(one.logged)]
        metrics.append(conn, trial_id, one.token.attempt, one.token.generation, rows)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_metrics_are_those_that_the_newest_weights_hold(lab: Lab, actions: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(LocalPlace(Path(folder)))
        play(world, actions)
    trial = lab.trial({"id": new_id("trial")}, objective=None)
    lab.store.write(lambda conn: store_starts(conn, trial.id, world, lab.now))
    newest = world.starts[-1].history
    assert whose(lab, trial.id) == {step: (token.attempt, token.generation) for step, token in newest.items()}

    end = {"expected": {S.QUEUED}, "after": S.CANCELLED, "actor": "t", "cause": "", "now": lab.now}
    lab.store.write(lambda conn: transitions.transition(conn, trial_id=trial.id, **end))
    with lab.store.read() as conn:
        facts = projection.facts(conn, [trial.id])[trial.id]
    for one in world.starts:
        told = {s for s in one.logged if judge(facts, *_numbers(one.token), s, patient=True) is Verdict.TELL}
        mine = {step for step, token in newest.items() if token == one.token}
        assert mine <= told <= set(newest), "a step that was told again at a fork is one in MLflow"


def _numbers(token: Token) -> tuple[int, int]:
    return token.attempt, token.generation

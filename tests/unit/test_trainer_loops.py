"""Loops, boundaries and state of a run, in one process."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_ranks import shared_lab

from overnight import trainer
from overnight.core.errors import BadInputError, CheckpointError, DatasetChangedError, SaveFailedError, SetupError
from overnight.trainer.data.record import Audit, audit
from overnight.trainer.execution import Run


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in list(os.environ):
        if name.startswith("OVERNIGHT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


class Counter:
    """A model whose state is what it has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def loader(n: int = 20, batch: int = 4, **kwargs: Any) -> trainer.DataLoader:
    return trainer.DataLoader(range(n), batch_size=batch, **kwargs)


def leave_at(run: Run, step: int) -> None:
    if run.step == step:
        os.kill(os.getpid(), signal.SIGTERM)


def attempts(script: Callable[[Run, Counter, int | None], None], *yields: int) -> tuple[Counter, int]:
    """Runs a script with yields at the given steps and then to the end; returns what it saw and its last step."""
    counter = Counter()
    for stop in (*yields, None):
        counter = Counter()
        try:
            with trainer.run(every=None) as run:
                run.track(counter=counter)
                script(run, counter, stop)
        except trainer.Yielded as left:
            assert left.saved and left.code == 75
        else:
            assert stop is None
    return counter, run.step


def test_batches_continue_over_epochs_and_states_at_epoch_ends() -> None:
    """C9 and C10: a stop at the end of an epoch, of any, of the last; and each epoch has an order of its own."""

    def script(run: Run, counter: Counter, stop: int | None) -> None:
        for batch in run.batches(loader(shuffle=True), epochs=3):
            counter.seen += batch.tolist()
            leave_at(run, stop or -1)

    whole, steps = attempts(script)
    assert steps == 15 and len(whole.seen) == 60
    assert whole.seen[:20] != whole.seen[20:40] and sorted(whole.seen[20:40]) == list(range(20))
    for stops in ([5], [10], [1, 2, 3], [5, 10, 14], [15]):
        sys.argv = ["script.py", "--fresh"]
        with pytest.raises(trainer.Yielded), trainer.run(every=None) as run:
            counter = Counter()
            run.track(counter=counter)
            script(run, counter, stops[0])
        sys.argv = ["script.py"]
        again, steps = attempts(script, *stops[1:])
        assert (again.seen, steps) == (whole.seen, 15), stops


def test_nested_and_sibling_loops_each_find_their_state() -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        data = loader(8)
        for epoch in run.epochs(2):
            for batch in run.batches(data):
                counter.seen += batch.tolist()
                leave_at(run, stop or -1)
            for step in run.steps(3):
                counter.seen.append(100 * (epoch + 1) + step)
                leave_at(run, stop or -1)
        for batch in run.batches(data):
            counter.seen.append(-int(batch[0]))
            leave_at(run, stop or -1)

    whole, steps = attempts(script)
    assert steps == 12
    assert whole.seen[:11] == [*range(8), 103, 104, 105]
    for number, stop in enumerate(range(1, 13)):
        Path(f"{number}").mkdir()
        os.chdir(f"{number}")
        assert attempts(script, stop)[0].seen == whole.seen, stop
        os.chdir("..")


def test_break_counts_the_batch_and_ends_the_loop_for_good() -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        data = loader()
        for batch in run.batches(data, epochs=5):
            counter.seen += batch.tolist()
            if len(counter.seen) >= 8:
                break
        assert run.step >= 2
        for batch in run.batches(data):
            counter.seen += batch.tolist()
            leave_at(run, stop or -1)

    assert attempts(script, 4)[0].seen == [*range(8), *range(20)]


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_a_break_is_no_loss_but_a_loss_beside_it_is(micro_batch: int) -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        data = trainer.DataLoader(range(20), global_batch_size=4, micro_batch_size=micro_batch, shuffle=True)
        for _ in run.batches(data, epochs=5):
            leave_at(run, stop or -1)
            if run.step == 9:  # in the second epoch; with two micro-batches in the midst of an update
                break
        for _ in run.batches(data, epochs=2):
            leave_at(run, stop or -1)

    for stop in (None, 3, 9, 12):
        sys.argv = ["script.py", "--fresh"]
        with pytest.raises(trainer.Yielded) if stop else nullcontext(), trainer.run(every=None) as run:
            run.track(counter=Counter())
            script(run, Counter(), stop)
        sys.argv = ["script.py"]
        if stop:
            attempts(script)
        counted = audit(run.trial_dir)
        kept = 20 + 12 + 4 * (micro_batch == 4) + 40
        assert (counted.expected, counted.recorded, counted.repeated, counted.skipped) == (kept, kept, 0, 0), stop
    damaged = run._attempt_dir / "samples" / "rank-0.1.bin"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    assert audit(run.trial_dir).skipped > 0


def test_time_that_is_over_is_no_loss() -> None:
    with trainer.run(every=None) as run:
        run.track(counter=Counter())
        data = loader()
        for _ in run.batches(data, seconds=1e-9):
            pass
        list(run.batches(data))
    assert audit(run.trial_dir) == Audit(expected=24, recorded=24, repeated=0, skipped=0, updates=6)


def test_an_exception_does_not_count_the_batch() -> None:
    def run_once(fail: bool) -> list[int]:
        seen = []
        with trainer.run(every=2) as run:
            run.track(counter=Counter())
            for batch in run.batches(loader()):
                seen += batch.tolist()
                if fail and run.step == 3:
                    raise RuntimeError("boom")
        return seen

    with pytest.raises(RuntimeError, match="boom"):
        run_once(True)
    assert run_once(False) == list(range(8, 20))


def test_accumulation_counts_updates_and_says_when() -> None:
    with trainer.run(every=None) as run:
        data = trainer.DataLoader(range(24), global_batch_size=12, micro_batch_size=4)
        rows = [(run.step, run.update_now, run.accumulate, run.every(updates=2)) for _ in run.batches(data)]
    assert rows == [
        (1, False, 3, False),
        (1, False, 3, False),
        (1, True, 3, False),
        (2, False, 3, False),
        (2, False, 3, False),
        (2, True, 3, True),
    ]
    assert run.step == 2


def test_seconds_end_a_loop_and_survive() -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        for _ in run.batches(loader(4, 4), seconds=0.2):
            counter.seen.append(run.step)
            leave_at(run, stop or -1)

    seen = attempts(script, 3)[0].seen
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 3


def test_save_in_the_body_waits_for_the_boundary() -> None:
    with trainer.run(every=None) as run:
        counter = Counter()
        run.track(counter=counter)
        for step in run.steps(3):
            if step == 2:
                handle = run.save()
                counter.seen.append(step)
            if step == 3:
                handle.result(60)
            saved = sorted(p.name for p in Path(run._origin.place.root).glob("step-*"))
            assert saved == (["step-2.attempt-1.1"] if step == 3 else [])
    facts = trainer.inspect(run._origin.place.root)
    assert (facts["step"], facts["good"]) == (3, True)


def test_saving_twice_at_one_step_keeps_both_apart() -> None:
    """C7: never old metadata over new data."""
    with trainer.run(every=None) as run:
        counter = Counter()
        run.track(counter=counter)
        run.save()
        run.save()
        counter.seen.append(7)
        run.save().result(60)
        names = sorted(p.name for p in Path(run._origin.place.root).glob("step-*") if p.suffix != ".partial")
    assert names == ["step-0.attempt-1.1", "step-0.attempt-1.1.again-3"]  # the second had nothing new
    with trainer.run(every=None) as run:
        counter = Counter()
        run.track(counter=counter)
        assert run.resumed and counter.seen == [7]


def test_objects_may_be_tracked_one_at_a_time_and_late() -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        late = {"n": 0}
        for number in run.steps(4):
            if number == run._first_step + 1:
                run.track(late=late)
            late["n"] += number
            counter.seen.append(late["n"])
            leave_at(run, stop or -1)

    assert attempts(script, 2)[0].seen == [1, 3, 6, 10]


def test_names_and_objects_that_cannot_be_tracked() -> None:
    with trainer.run(every=None) as run:
        with pytest.raises(CheckpointError, match="the run's own"):
            run.track(state={})
        with pytest.raises(CheckpointError, match="no state_dict"):
            run.track(x=3)
        run.track(a={})
        with pytest.raises(CheckpointError, match="tracked already"):
            run.track(a={})


def test_state_that_does_not_fit_is_an_error() -> None:
    with trainer.run(every=None) as run:
        run.track(model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"'model' in step-0\.attempt-1\.1 does not fit"), trainer.run() as run:
        run.track(model=torch.nn.Linear(2, 3))


def test_what_is_missing_on_either_side_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with trainer.run(every=None) as run:
        run.track(old={})
    with trainer.run(every=None) as run:
        run.track(new={})
        list(run.steps(1))
    said = capsys.readouterr().err
    assert "'new' is not in step-0" in said and "'old' is in step-0" in said


@pytest.mark.parametrize(
    "other", [[*range(24)], [99, *range(1, 20)], [*range(19), 99]], ids=["length", "first", "last"]
)
def test_a_changed_dataset_is_refused_before_an_update(other: list[int]) -> None:
    """C13: its length, or its content at the same length."""
    num_updates = 0
    for data, expected in (([*range(20)], trainer.Yielded), (other, DatasetChangedError), ([*range(20)], None)):
        with pytest.raises(expected) if expected else nullcontext(), trainer.run(every=None) as run:
            run.track(c=Counter())
            for _ in run.batches(trainer.DataLoader(data, batch_size=4)):
                num_updates += 1
                leave_at(run, 2 if expected else -1)
        assert num_updates == (2 if expected else 5)


def test_iterators_made_before_tracking_and_before_the_state_is_loaded_continue_too() -> None:
    """C11."""

    def script(run: Run, counter: Counter, stop: int | None) -> None:
        data = loader(shuffle=True)
        early, batches = iter(data), run.batches(data)
        run.track(late={})
        for batch in batches:
            if early is not None:
                assert next(early).tolist() == batch.tolist(), "it is where the loop is, not where it was made"
                early = None
            counter.seen += batch.tolist()
            leave_at(run, stop or -1)

    whole = attempts(script)[0].seen
    assert sorted(whole) == list(range(20)) != whole
    Path("again").mkdir()
    os.chdir("again")
    assert attempts(script, 2)[0].seen == whole


def test_loops_refuse_what_they_cannot_do() -> None:
    with trainer.run(every=None) as run:
        with pytest.raises(BadInputError, match=r"trainer\.DataLoader, not a list"):
            run.batches([1, 2])  # type: ignore[arg-type]
        with pytest.raises(BadInputError):
            run.every()
        with pytest.raises(BadInputError):
            run.every(updates=0)
    with pytest.raises(BadInputError, match="entered once"), run:
        pass


def test_check_leaves_between_loops_with_a_save() -> None:
    with pytest.raises(trainer.Yielded) as caught, trainer.run(every=None) as run:
        run.track(c=Counter())
        list(run.steps(2))
        os.kill(os.getpid(), signal.SIGTERM)
        run.check()
    assert caught.value.saved and caught.value.step == 2


def test_check_inside_a_body_waits_for_the_boundary() -> None:
    with pytest.raises(trainer.Yielded) as caught, trainer.run(every=None) as run:
        counter = Counter()
        run.track(c=counter)
        for step in run.steps(5):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                run.check()
            counter.seen.append(step)
    assert caught.value.saved and counter.seen == [1, 2, 3]


def test_nothing_after_the_loop_runs_on_a_yield_even_with_except_exception() -> None:
    ran = []
    with pytest.raises(trainer.Yielded), trainer.run(every=None) as run:
        run.track(c=Counter())
        try:
            for _ in run.steps(5):
                os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            ran.append("except")
        ran.append("after")
    assert ran == []


def test_weights_are_equal_on_a_second_start_and_seeds_are_pure() -> None:
    def start() -> tuple[torch.Tensor, list[int]]:
        with trainer.run(every=None, fresh=True, seed=5) as run:
            return torch.nn.Linear(3, 3).weight.detach().clone(), run.seeds([1, "a"])

    (first, seeds), (second, again) = start(), start()
    assert torch.equal(first, second) and seeds == again and len(set(seeds)) == 2


def test_params_choose_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["--lr", "2"], ["--lr", "1"]):
        monkeypatch.setattr(sys, "argv", ["script.py", *argv, "positional"])
        with trainer.run(defaults={"lr": 1.0}, every=None) as run:
            run.track(c=Counter())
            assert run.argv == ["positional"]
            assert run.resumed == (argv == ["--lr", "1"])
    folders = [path for path in Path(".overnight").glob("*/*") if path.is_dir()]
    assert len(folders) == 2
    assert Path(".overnight/.gitignore").read_text() == "*\n"


def test_sys_exit_zero_is_an_end_and_one_is_not() -> None:
    for code in (1, 0):
        with pytest.raises(SystemExit), trainer.run(every=None) as run:
            run.track(c=Counter())
            for step in run.steps(3):
                if step == 2:
                    sys.exit(code)
        assert (run._attempt_dir / "final.json").exists() == (code == 0)
    assert trainer.inspect(run._origin.place.root)["step"] == 2


def test_a_folder_that_cannot_be_written_is_named() -> None:
    (Path.cwd() / ".overnight" / ".gitignore").mkdir(parents=True)  # what no user may write to, not even root
    with pytest.raises(SetupError, match=r"cannot be written.*\.gitignore") as raised, trainer.run(every=None):
        pytest.fail("the run has begun")
    assert ".overnight" in raised.value.hint


def test_an_attempt_folder_that_is_gone_at_the_end_is_a_named_error() -> None:
    with pytest.raises(SaveFailedError, match=r"final\.json: No such file"), trainer.run(every=None) as run:
        shutil.rmtree(run.trial_dir / "attempts")


def test_a_checkpoint_place_that_is_gone_fails_the_next_save_and_is_not_made_again() -> None:
    last = 1_000_000
    with pytest.raises(SaveFailedError, match="place was deleted or replaced"), trainer.run(every=None) as run:
        for step in run.steps(last):
            if step == 3:
                shutil.rmtree(run.trial_dir / "checkpoints")
                run.save()
    assert run.step < last, "it is raised at a boundary, not at the end"
    assert not (run.trial_dir / "checkpoints").exists()


def test_a_start_with_no_update_left_still_tells_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    def script(run: Run, counter: Counter, stop: int | None) -> None:
        for _ in run.steps(3):
            leave_at(run, stop or -1)
        run.report(score=0.5)

    attempts(script, 3)
    assert "no update was left to do after step 3, score 0.5;" in capsys.readouterr().err


FORKING = """
    import os, signal, sys, time
    import torch
    from overnight import trainer

    def ends(pid, kill=None):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if kill is not None:
                os.kill(pid, kill)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        return "hangs"

    seen, codes, loader = [], [], trainer.DataLoader(range(24), batch_size=2, num_workers=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parent = os.getpid()
    with trainer.run(every=1) as run:
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(loader):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            # children come here
            seen += batch.tolist()
    print("parent" if os.getpid() == parent else "child", codes, seen == list(range(24)), run.step, flush=True)
"""


def fork_in_each_update(children: list[str]) -> Path:
    """Writes a script with loader workers whose updates each fork a child, wait for its end, and go on."""
    lines = ["if run.step > len(CHILDREN): pass"]
    for number, child in enumerate(children, 1):
        kill = int(signal.SIGTERM) if "while True" in child else None
        lines += [f"elif run.step == {number}:", "    pid = os.fork()", "    if pid == 0:", f"        {child}"]
        lines += ["    else:", f"        codes.append(ends(pid, {kill}))"]
    chain = textwrap.indent("\n".join(lines).replace("len(CHILDREN)", str(len(children))), " " * 8)
    path = Path("script.py").absolute()
    path.write_text(textwrap.dedent(FORKING).replace(" " * 8 + "# children come here", chain))
    return path


def test_a_forked_child_ends_and_does_not_act_as_the_run(tmp_path: Path) -> None:
    leaves = ["sys.exit(0)", "break", "with run.phase('eval'): sys.exit(0)"]
    stays = ["pass", "run.save()", "run.check()", "run.report(score=1.0)", "next(iter(run.steps(3)))"]
    codes = shared_lab().run(fork_in_each_update(leaves + stays), tmp_path)
    said = (tmp_path / "log").read_text()
    assert codes == [0], said
    assert "parent [0, 0, 0, 1, 1, 1, 1, 1] True 12" in said
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("parent", "child"))] == [
        "child",
        "parent",
    ], "only the child that left by a break comes here"
    assert said.count("BadInputError: this process was forked from the run") == len(stays)
    assert said.count("Traceback") == len(stays), said
    assert said.count("finished at step 12") == 1
    (folder,) = Path(".overnight/script").iterdir()
    assert audit(folder) == Audit(expected=24, recorded=24, repeated=0, skipped=0, updates=12)


def test_a_forked_child_dies_of_signals_and_survives_the_end_of_its_interpreter() -> None:
    path = fork_in_each_update(["while True: time.sleep(1)", "sys.exit(0)"])
    command = [sys.executable, "-W", "ignore", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert f"parent [{-signal.SIGTERM}, 0] True 12" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr

"""Saves behind training: what the handle tells, what failures do, and what is never lost."""

import gc
import os
import resource
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_ranks import shared_lab
from waiting import wait_for

from overnight import trainer
from overnight.core.errors import BadInputError, CheckpointError, SaveFailedError
from overnight.trainer.checkpoint.handle import SaveHandle, Saving
from overnight.trainer.checkpoint.manifest import verify
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.reading.finding import open_newest
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.reading.source import open_source
from overnight.trainer.checkpoint.writing.ticket import Ticket
from overnight.trainer.execution import Run

DEADLINE_SECONDS = 60.0
LARGE = 300_000


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in list(os.environ):
        if name.startswith("OVERNIGHT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


class Training:
    """A small model and what a script does with it."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def track(self, run: Run) -> None:
        run.track(model=self.model, optimizer=self.optimizer)

    def backward(self) -> None:
        self.model(torch.ones(2, self.model.in_features)).square().mean().backward()

    def update(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def place_of(run: Run) -> LocalPlace:
    return LocalPlace(run.trial_dir / "checkpoints")


def saved_steps(run: Run) -> list[int]:
    return sorted(name.step for name in place_of(run).checkpoints())


def newest(run: Run) -> dict[str, Any]:
    restored = open_newest(place_of(run))
    assert restored is not None
    state: dict[str, Any] = restored.state("model")
    return state


def is_idle(run: Run) -> bool:
    """Whether no save is under way any more."""
    run._saver.pipeline.poll()
    return not run._saver.pipeline.writing


def writer_pid(run: Run) -> int:
    pid = run._saver.pipeline._writer.pid
    assert pid is not None
    return pid


@contextmanager
def stopped_writer(run: Run) -> Iterator[Callable[[], None]]:
    """Keeps the writer process from working until the function that it gives is called."""
    pid = writer_pid(run)
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    try:
        yield go_on
    finally:
        go_on()


@contextmanager
def no_file_above(num_bytes: int, pid: int) -> Iterator[None]:
    """What a writer process meets on a full disk, without filling one."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_at_the_first_boundary_is_written_while_an_update_lasts() -> None:
    training = Training(width=1500)  # staged when the boundary is over
    with trainer.run(every=None) as run:
        training.track(run)
        for number, _ in enumerate(run.steps(2)):
            training.update()
            if number == 0:
                run.save()
            else:
                wait_for(partial(saved_steps, run), "the writer has worked without the loop")


def test_a_handle_tells_how_far_its_save_is() -> None:
    training = Training()
    with trainer.run(every=None) as run:
        training.track(run)
        handle = None
        for step in run.steps(3):
            training.update()
            if step == 1:
                handle = run.save()
                assert not handle.staged and not handle.committed
                with pytest.raises(BadInputError, match="next boundary"):
                    handle.result()
            if step == 2 and handle is not None:
                wait_for(partial(getattr, handle, "staged"), "staged")
                uri = handle.result(DEADLINE_SECONDS)
                assert handle.committed and uri.endswith("step-1.attempt-1.1") and Path(uri).is_dir()
        assert "committed" in repr(handle)


def test_a_save_between_loops_begins_at_once() -> None:
    training = Training()
    with trainer.run(every=None) as run:
        training.track(run)
        for _ in run.steps(1):
            training.update()
        with stopped_writer(run) as go_on:
            handle = run.save()
            wait_for(lambda: handle.staged, "staged")
            with pytest.raises(TimeoutError):
                handle.result(0.05)
            go_on()
        handle.result(DEADLINE_SECONDS)


def test_saving_twice_at_a_step_keeps_both_apart() -> None:
    """C7."""
    training = Training()
    with trainer.run(every=None, keep=5) as run:
        training.track(run)
        for _ in run.steps(1):
            training.update()
        first = run.save()
        training.update()
        second = run.save()
        weight = training.weight
        assert Path(first.result()).name == "step-1.attempt-1.1"
        assert Path(second.result()).name == "step-1.attempt-1.1.again-2"
        assert torch.equal(newest(run)["weight"], weight)


def test_saves_while_one_is_written_become_one_and_are_counted() -> None:
    training = Training()
    with trainer.run(every=1) as run:
        training.track(run)
        handles = []
        for step in run.steps(8):
            training.update()
            if step == 3:
                wait_for(lambda: is_idle(run), "the first saves")
                os.kill(writer_pid(run), signal.SIGSTOP)
            if step in (5, 6):
                handles.append(run.save())
            if step == 7:
                assert not any(handle.staged for handle in handles)
                os.kill(writer_pid(run), signal.SIGCONT)
                wait_for(lambda: is_idle(run) or not run._saver.pipeline.busy, "the writer")
        assert {handle.result() for handle in handles} == {f"{place_of(run)}/step-7.attempt-1.1"}
        assert run._ledger._counts["saves_coalesced"] >= 3


def test_a_full_disk_is_raised_at_the_next_boundary_and_spares_what_is_there() -> None:
    """C1."""
    training = Training()
    reached = 0
    with pytest.raises(SaveFailedError, match="not saved"), trainer.run(every=None) as run:
        training.track(run)
        run.state["large"] = torch.zeros(1)
        for _ in run.steps(1):
            training.update()
        weight = training.weight
        run.save().result(DEADLINE_SECONDS)
        with no_file_above(100_000, writer_pid(run)):
            for step in run.steps(50, name="more"):
                reached = step
                training.update()
                if step == 3:
                    run.state["large"] = torch.randn(LARGE)
                    run.save()
                if step == 4:
                    wait_for(lambda: is_idle(run), "the failure")
    assert reached == 4
    assert torch.equal(newest(run)["weight"], weight)
    assert saved_steps(run) == [1]


def test_a_state_that_cannot_be_saved_is_raised_and_the_save_before_survives_byte_for_byte() -> None:
    """C5."""

    def stored() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in place_of(run).root.rglob("*") if path.is_file()}

    training = Training()
    with pytest.raises(SaveFailedError, match=r"^state\.odd is a lock") as caught, trainer.run(every=None) as run:
        training.track(run)
        for _ in run.steps(1):
            training.update()
        run.save().result(DEADLINE_SECONDS)
        before = stored()
        run.state["odd"] = threading.Lock()
        for step in run.steps(3, name="more"):
            training.update()
            if step == 2:
                run.save()
            assert step < 3, "it is raised at the boundary of the save"
    assert caught.value.hint
    assert stored() == before and saved_steps(run) == [1]
    with trainer.run(every=None) as run:
        assert run.resumed


def test_a_failure_that_somebody_asked_for_is_not_raised_again() -> None:
    training = Training()
    with trainer.run(every=None) as run:
        training.track(run)
        for _ in run.steps(1):
            training.update()
        run.state["large"] = torch.randn(LARGE)
        place_of(run).root.rename(run.trial_dir / "away")
        place_of(run).root.write_text("no folder")
        handle = run.save()
        with pytest.raises(CheckpointError):
            handle.result(DEADLINE_SECONDS)
        assert not handle.committed
        place_of(run).root.unlink()
        (run.trial_dir / "away").rename(place_of(run).root)
        for _ in run.steps(2, name="more"):
            training.update()
    assert saved_steps(run)[-1] == 3


def script(tmp_path: Path, body: str) -> tuple[int, str]:
    """Runs a script of its own; its exit code and all that it said."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, resource, signal, sys, time, torch\n"
        "from overnight import trainer\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def update():\n"
        "    model(torch.ones(1, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        + textwrap.dedent(body)
    )
    [code] = shared_lab().run(path, tmp_path)
    return code, (tmp_path / "log").read_text()


def test_a_last_save_that_fails_is_no_success(tmp_path: Path) -> None:
    """C2."""
    code, said = script(
        tmp_path,
        """
        with trainer.run(every=None) as run:
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(3):
                update()
            writer = run._saver.pipeline._writer.pid
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            run.state["large"] = torch.randn(300_000)
        print("never said")
        """,
    )
    assert code == 1
    assert "SaveFailedError" in said and "was not saved" in said
    assert "never said" not in said and "finished at step" not in said
    assert not list(tmp_path.glob(".overnight/*/*/attempts/*/final.json"))


def test_a_background_save_that_fails_last_is_no_success_though_the_final_one_is(tmp_path: Path) -> None:
    """C2."""
    code, said = script(
        tmp_path,
        """
        with trainer.run(every=None) as run:
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(3):
                update()
            checkpoints = run.trial_dir / "checkpoints"
            checkpoints.rename(run.trial_dir / "away"); checkpoints.write_text("no folder")
            run.save()
            while not run._saver.pipeline._failed:
                run._saver.pipeline.poll()
            checkpoints.unlink(); (run.trial_dir / "away").rename(checkpoints)
        """,
    )
    assert code == 1 and "was deleted or replaced while the run was at work" in said
    assert len(list(tmp_path.glob(".overnight/*/*/checkpoints/step-3.*"))) == 1


def test_a_step_that_never_ends_does_not_keep_what_is_staged_from_its_commit(tmp_path: Path) -> None:
    code, said = script(
        tmp_path,
        """
        with trainer.run(every=None) as run:
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(9):
                if step == 3:
                    loss = model(torch.ones(1, 8)).sum()
                    while not (run.trial_dir / "checkpoints/step-2.attempt-1.1").exists():
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                update()
                if step == 2:
                    run.save()
        """,
    )
    assert code == -signal.SIGKILL, said


def test_a_run_that_ends_by_an_error_commits_what_is_staged() -> None:
    training = Training()
    with pytest.raises(ZeroDivisionError), trainer.run(every=None) as run:
        training.track(run)
        for step in run.steps(5):
            training.update()
            if step == 1:
                run.save()
            if step == 2:
                raise ZeroDivisionError
    assert saved_steps(run) == [1]


def test_a_save_between_loops_that_is_discarded_says_so_and_is_taken_again() -> None:
    training = Training(256)
    with trainer.run(every=None) as run:
        training.track(run)
        for _ in run.steps(2):
            training.update()
        gate = threading.Event()
        hold(run, gate)
        handle = run.save()
        training.model.weight.data.mul_(1.5)
        gate.set()
        with pytest.raises(BadInputError, match="was discarded"):
            handle.result(DEADLINE_SECONDS)
        for _ in run.steps(1):
            training.update()
        assert handle.result(DEADLINE_SECONDS).endswith("step-3.attempt-1.1")
        assert torch.equal(newest(run)["weight"], training.weight)


def test_a_save_that_finds_nothing_new_is_the_one_that_is_there() -> None:
    training = Training()
    with trainer.run(every=None) as run:
        training.track(run)
        for _ in run.steps(2):
            training.update()
        uris = [run.save().result(DEADLINE_SECONDS) for _ in range(3)]
        assert len(set(uris)) == 1 and Path(uris[0]).is_dir()


def test_large_tensors_that_shrink_and_strided_ones_that_grow_are_saved() -> None:
    table = {"large": torch.ones(2_500_000), "strided": torch.zeros(20, 30).t(), "n": 0}
    with trainer.run(every=None) as run:
        run.track(table=table)
        for step in run.steps(6):
            if step == 3:
                table["large"], table["strided"] = torch.ones(10), torch.zeros(2000, 3000).t()
            run.save()
    restored = open_newest(place_of(run))
    assert restored is not None and restored.manifest.step == 6
    found = restored.state("table")
    assert torch.equal(found["large"], torch.ones(10)) and found["strided"].shape == (3000, 2000)


def test_tensors_that_get_another_form_in_their_memory_are_saved_as_they_are() -> None:
    table = {"w": torch.arange(6.0).view(2, 3), "n": 0}
    with trainer.run(every=1, keep=50) as run:
        run.track(table=table)
        for step in run.steps(12):
            table["n"] = step
            if step % 3 == 2:
                table["w"].t_()
            if step == 7:
                table["w"].resize_(5)
            if step == 9:
                table["w"].resize_(2, 2)
    restored = open_newest(place_of(run))
    assert restored is not None and restored.manifest.step == 12
    found = restored.state("table")
    assert found["n"] == 12 and torch.equal(found["w"], table["w"])
    for name in place_of(run).checkpoints():
        folder = place_of(run).path(name)
        state = Restored(open_source(place_of(run), name), verify(folder)).state("table")
        assert state["n"] == name.step and tuple(state["w"].shape) == FORMS[name.step - 1]


FORMS = [(2, 3), (3, 2), (3, 2), (3, 2), (2, 3), (2, 3), (5,), (5,), (2, 2), (2, 2), (2, 2), (2, 2)]


def test_a_save_that_is_discarded_is_taken_again_at_the_next_boundary() -> None:
    training = Training(256)
    with trainer.run(every=None) as run:
        training.track(run)
        handle, weight, gate = None, torch.empty(0), threading.Event()
        for step in run.steps(6):
            training.backward()
            if step == 3:
                training.model.weight.data.mul_(1.5)
                gate.set()
                wait_for(lambda: not run._saver.pipeline.busy, "the end of the copy")
            training.optimizer.step()
            training.optimizer.zero_grad()
            if step == 2:
                hold(run, gate)
                handle = run.save()
            if step == 3:
                weight = training.weight
        assert handle is not None
        assert handle.result(DEADLINE_SECONDS).endswith("step-3.attempt-1.1")
        restored = open_newest(place_of(run))
        assert restored is not None and torch.equal(restored.state("model")["weight"], weight)
        assert run._saver._stager.restless == {"model"}


def hold(run: Run, gate: threading.Event) -> None:
    """Keeps the staging thread from copying until the event is set."""

    def wait() -> None:
        gate.wait(DEADLINE_SECONDS)

    run._saver._stager._worker.do(wait)


class Accumulating(Training):
    """Accumulates over three updates of the run by itself."""

    def round(self, step: int) -> None:
        self.model(torch.full((2, self.model.in_features), float(step))).square().mean().backward()
        if step % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def accumulate(stop: int | None = None, every: int | None = None) -> tuple[Run, Accumulating]:
    training = Accumulating()
    with trainer.run(every=every, keep=20) as run:
        training.track(run)
        for step in run.steps(12):
            wait_for(lambda: is_idle(run), "the save before")
            training.round(step)
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
    return run, training


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_yield_in_the_middle_of_an_accumulation_saves_the_gradients(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14."""
    (tmp_path / "undisturbed").mkdir()
    monkeypatch.chdir(tmp_path / "undisturbed")
    _, undisturbed = accumulate()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trainer.Yielded):
        accumulate(stop)
    run, training = accumulate()
    assert run.resumed
    assert torch.equal(training.weight, undisturbed.weight)


def test_periodic_saves_wait_for_the_first_boundary_behind_a_step() -> None:
    run, _ = accumulate(every=4)
    assert saved_steps(run) == [6, 9, 12]


def test_many_saves_of_a_run_leave_nothing_behind() -> None:
    """C18, whole: descriptors, threads and the heap. The staging memory over a thousand saves has a test of its own."""
    training, num_saves, grown = Training(), 16, []
    with trainer.run(every=None) as run:
        training.track(run)
        save_each(run, training, 10, name="first")
        files, threads, objects = left_behind()
        for number in range(3):  # what a save leaves is there each time; what else goes on in this process is not
            save_each(run, training, num_saves, name=f"more-{number}")
            more_files, more_threads, more_objects = left_behind()
            grown.append(more_objects - objects)
            objects = more_objects
        assert more_files <= files + 1 and more_threads <= threads
        assert min(grown) < num_saves, grown
        assert run._ledger._counts["saves"] >= 3 * num_saves


def test_what_is_known_of_a_save_goes_with_its_handle() -> None:
    """At once: what waits for the collector, for thousands of saves, splits the heap meanwhile."""
    training = Training()
    with trainer.run(every=None) as run:
        training.track(run)
        save_each(run, training, 3, name="first")
        gc.disable()
        try:
            save_each(run, training, 10, name="more")
            known = known_saves()
        finally:
            gc.enable()
    assert len(known) < 10, known


def test_failures_of_which_the_script_was_told_are_forgotten() -> None:
    training = Training(width=256)
    with trainer.run(every=None) as run:
        training.track(run)
        save_each(run, training, 3, name="first")
        with no_file_above(100_000, writer_pid(run)):
            for _ in range(10):
                for _ in run.steps(1, name="more"):
                    training.update()
                with pytest.raises(SaveFailedError):
                    run.save().result()
            gc.collect()
            known = known_saves()
    assert len(known) < 10, known


def known_saves() -> list[Any]:
    """All that there is of saves in this process."""
    return [one for one in gc.get_objects() if type(one) in (Saving, SaveHandle, Ticket)]


def save_each(run: Run, training: Training, num_updates: int, name: str) -> None:
    """Saves each update, and waits for the commit before the next."""
    for _ in run.steps(num_updates, name=name):
        wait_for(lambda: is_idle(run), "the save before")
        training.update()
        run.save()
    run.save().result()


def left_behind() -> tuple[int, int, int]:
    """Descriptors, threads and objects of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(gc.get_objects())

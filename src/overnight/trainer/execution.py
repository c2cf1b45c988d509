"""The run: what a training script holds on to while the platform starts, stops, moves and resumes it."""

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overnight.core.errors import BadInputError, CheckpointError
from overnight.trainer import buckets, rng, untracked
from overnight.trainer.agreement import Agreement, Spot, Wishes
from overnight.trainer.boundary import Every, Leave, Policy, Signals
from overnight.trainer.checkpoint.handle import SaveHandle
from overnight.trainer.checkpoint.pipeline import Moment
from overnight.trainer.checkpoint.place import write_atomic
from overnight.trainer.checkpoint.reader import complain
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.saver import GRADIENTS, INTERNAL
from overnight.trainer.checkpoint.writing.order import Kind
from overnight.trainer.cursor import Cursor, Pending, Reader
from overnight.trainer.data.loader import DataLoader
from overnight.trainer.envelope import envelope
from overnight.trainer.exits import Interrupted, Left, Stopped, Yielded, describe, is_success
from overnight.trainer.journal import Reduce, Values
from overnight.trainer.link import Link
from overnight.trainer.loops import Loop, Loops
from overnight.trainer.meshes import Arrangement, join_group_of_one
from overnight.trainer.metrics import Metrics
from overnight.trainer.orders import Orders
from overnight.trainer.params import Params
from overnight.trainer.phases import CATEGORIES, Ledger, Reached, seconds_since_launch
from overnight.trainer.saves import Saves
from overnight.trainer.stacks import answer_with_stacks
from overnight.trainer.start import (
    Inputs,
    claim_origin,
    join_group,
    make_saver,
    open_record,
    pick_device,
    read_inputs,
    reader_of,
    tell_differences,
)
from overnight.trainer.warm import WarmStart, What

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RUN = f"{INTERNAL}run"
RNG = f"{INTERNAL}rng"
STATE = "state"

MIN_GRACE_SECONDS = 5.0
"""With less than this left of a grace, :meth:`Run.check` leaves without waiting for the next boundary."""


LEAVE_SECONDS = 1.0
"""Of a grace, what is kept for leaving once the save is done."""

MIN_SAVE_SECONDS = 0.5

LATE_SECONDS = 10.0
"""How long a run that ends before its end waits for the commit of what is staged."""


class Run:
    """One execution of a training script; made by :func:`overnight.trainer.run` and used as a context manager.

    Attributes:
        params: The trial's params over the script's defaults.
        device: This rank's device.
        rank, world_size: Of this process.
        seed: The trial's seed.
        state: A tracked dict for small things, such as the best value so far.
        resumed: Whether this run continues from a checkpoint.
        argv: Command-line arguments that are not params.
        trial_dir: Persistent folder of the trial.
    """

    params: Params
    device: torch.device
    rank: int
    world_size: int
    seed: int
    state: dict[str, Any]
    resumed: bool
    argv: list[str]
    trial_dir: Path

    def __init__(
        self, defaults: Mapping[str, Any], *, every: Every, retention: Retention, fresh: bool, seed: int
    ) -> None:
        self._defaults = dict(defaults)
        self._every = every
        self._retention = retention
        self._fresh = fresh
        self.seed = seed
        self._entered = False
        self._ready = False
        self._named_untracked = False
        self._phase = ""

    # -- beginning and end ------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        if self._entered:
            raise BadInputError("a run can be entered once", hint="Make another with trainer.run().")
        self._entered = True
        inputs = read_inputs(self._defaults, self._fresh)
        self.params, self.argv = inputs.params, inputs.rest
        environment = inputs.environment
        self._policy = Policy(self._every, environment.world_size, mtbf_seconds=environment.mtbf_seconds)
        self._signals = Signals()
        self._signals.install(alone=environment.alone)
        self._ledger = Ledger(launched=seconds_since_launch(environment.attempt_dir))
        self._ledger.switch("restore")
        try:
            self._start(inputs)
        except BaseException:
            self._signals.restore()
            raise
        return self

    def _start(self, inputs: Inputs) -> None:
        environment = inputs.environment
        self.rank, self.world_size = environment.rank, environment.world_size
        self.seed = self.seed if environment.seed is None else environment.seed
        self.device = pick_device(environment)
        self._arrangement = Arrangement(self.rank, self.world_size)
        answer_with_stacks(environment)
        self._link = Link(environment.supervisor, self.rank, os.getpid(), self._ledger.pulse)
        self._link.open()
        self._orders = Orders(self._signals, self._link)
        group, self._owns_group = join_group(environment, self.device)
        self._metrics = Metrics(self._link, self._ledger, self.rank, group)
        self._agreement = Agreement(group, self._metrics.journal)
        self._reader = reader_of(environment, group)
        self._origin = claim_origin(inputs, group)
        self.resumed = self._origin.restored is not None
        if self.rank == 0:
            self._link.send("/v1/forked", self._origin.fork)
        self.trial_dir, self._attempt_dir = self._origin.trial_dir, self._origin.attempt_dir
        self._saver = make_saver(
            self._origin, self.seed, self.device, self._retention, before_submit=self._tell_before_publishing
        )
        self._saves = Saves(
            self._saver,
            self._policy,
            self._ledger,
            self._link,
            moment=self._moment,
            meet=self._meet_at_save,
            rank=self.rank,
            world_size=self.world_size,
        )
        self.state = {}
        self._saver.track(STATE, self.state)
        self._reached = Reached(self.trial_dir, self._attempt_dir)
        self._record = open_record(self._origin)
        self._restore_own_state()
        rng.seed_all(rng.derive(self.seed, "initial"))
        self._ledger.switch("compute")

    def _restore_own_state(self) -> None:
        saved = self._origin.restored.state(RUN) if self._origin.restored is not None else None
        self._first_step: int = saved["step"] if saved else 0
        self._saved_peers = saved.get("peers", []) if saved else []
        reader = Reader(self.rank, self.world_size, self.seed)
        loader_states = saved["loaders"] if saved else {}
        self._cursor = Cursor(reader, self._record, self._ledger, self._reached, self._first_step, loader_states)
        path = self._origin.restored.manifest.position["loops"] if self._origin.restored is not None else ()
        self._loops = Loops(saved["loops"] if saved else None, path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ledger.switch("shutdown")
        try:
            if is_success(error):
                self._finish()
            elif error is not None and not isinstance(error, Left | SystemExit):
                self._link.send("/v1/error", describe(error, self.step))
        except Exception as late:
            self._link.send("/v1/error", describe(late, self.step))
            raise
        finally:
            self._close(error)

    def _finish(self) -> None:
        """The end of a script that ran through: the last save is never skipped and its failure is the run's."""
        self._cursor.settle()
        self._gather(Spot.END)
        if self._saver.tracks:
            self._saves.finish("final")
        self._saves.require_good()
        if self.rank == 0:
            final = {"step": self._cursor.step, "weights": self.fingerprint()}
            write_atomic(self._attempt_dir / "final.json", json.dumps(final).encode())
        if self._origin.environment.alone and self.rank == 0:
            self._tell_end()

    def _tell_end(self) -> None:
        """The last line for the person at the terminal; under a supervisor the platform tells it."""
        if self.resumed and self._cursor.step == self._first_step:
            complain(f"nothing was left to do after step {self._cursor.step}; --fresh starts anew")
            return
        reported = self._metrics.reported.items()
        results = "".join(f", {name} {v:.6g}" if isinstance(v, float) else f", {name} {v}" for name, v in reported)
        complain(f"finished at step {self._cursor.step}{results}; saved in {self.trial_dir}")

    def _close(self, error: BaseException | None) -> None:
        clean = isinstance(error, Left) or is_success(error)
        try:
            self._close_saves(error)
            self._record.close()
            self._metrics.flush(self._cursor.step, "shutdown", everything=True)
        except Exception:  # a failure of its own must not hide the error that ends the run
            if clean:
                raise
        finally:
            self._link.close()
            if clean and self._owns_group and dist.is_initialized():
                dist.destroy_process_group()
            self._signals.restore()

    def _close_saves(self, error: BaseException | None) -> None:
        """Lets what is staged be committed; nobody is left to be told of a failure but the reader of the output."""
        seconds = LATE_SECONDS if not is_success(error) else 0.0
        if isinstance(error, Left) and not self._origin.environment.alone:
            seconds = min(seconds, max(0.0, self._orders.leave()[1] - LEAVE_SECONDS))
        failure = self._saves.close(seconds)
        if failure is not None:
            complain(f"a save was not committed: {failure.message}")

    # -- what the script tells ----------------------------------------------------------------------------------------

    def mesh(self, **sizes: int) -> "DeviceMesh":
        """The ranks as a mesh of named dimensions, outermost first: ``run.mesh(dp=-1, tp=2)``. All ranks call it.

        Ranks along ``dp``, ``dp_replicate``, ``dp_shard`` and ``fsdp`` train on different samples, their peers along
        ``tp``, ``cp`` and ``pp`` on the same: give the mesh to the loader too. When the first loop begins, the
        process's random numbers are seeded alike on peers. Where peers log a sum, it counts once.

        Args:
            **sizes: Ranks along each dimension; one may be -1, for what is left.

        Returns:
            A mesh of :attr:`device`'s type, the same one each time.

        Raises:
            BadInputError: The sizes do not multiply to the number of ranks (the hint names some that do), a name is
                not one of these, or the sizes are not those of the first call.
        """
        if self.world_size == 1:
            self._owns_group |= join_group_of_one(self.device)
        return self._arrangement.mesh(sizes, self.device)

    def track(self, **objects: Any) -> None:
        """Tracks objects by name and, in a resumed run, gives each its saved state at once.

        Args:
            **objects: Anything with ``state_dict`` and ``load_state_dict``; also dicts, tensors and generators, in
            place.

        Raises:
            CheckpointError: It cannot be tracked, or its saved state does not fit it; the message says why.
        """
        if STATE in objects:
            raise CheckpointError(f"{STATE!r} is the run's own", hint="Use run.state, or another name.")
        with self._ledger.within("restore"):
            for name, obj in objects.items():
                self._saver.track(name, obj)

    def warm_start(
        self,
        *,
        from_trial: str | None = None,
        step: int | None = None,
        path: str | Path | None = None,
        what: What = "weights",
        strict: bool = True,
    ) -> list[str]:
        """Fills what is tracked from another run's checkpoint, or from a file; a resumed run has its state already.

        Step, order of data and random numbers are not taken over. All ranks call it.

        Args:
            from_trial: Name or id of another trial of this home; under overnight only.
            step: Which of its checkpoints; without, its newest good one.
            path: Instead: a checkpoint or checkpoint place, or a ``torch.save`` or ``.safetensors`` file.
            what: ``"weights"`` fills modules only, ``"all"`` every tracked object that is there.
            strict: Modules must fit exactly. Otherwise what fits is taken, and the rest is named.

        Returns:
            Names of the objects that were filled; none in a resumed run.

        Raises:
            BadInputError, NotFoundError: There is no such source, or nothing in it for this run.
            CheckpointError: The source is damaged, or does not fit.
        """
        if self.resumed:
            return []
        with self._ledger.within("restore"):
            holder = f"warm start of {self._origin.environment.trial_name or self.trial_dir}"
            start = WarmStart(self._saver.tracked, self.device, self._reader, self.trial_dir, holder)
            return start.begin(from_trial=from_trial, step=step, path=path, what=what, strict=strict)

    def log(self, values: Values = None, /, *, reduce: Reduce = "mean", **more_values: Any) -> None:
        """Records metrics at :attr:`step`; tensors are kept and fetched at a later boundary, so nothing waits here.

        In a gang all ranks log the same names, and one value is made of theirs in the background: it arrives two
        updates later, at the latest with the next save or report. Means are weighted by the samples of the current
        micro-batch where the loader pads (``tail="pad"``), and a rank that has only padding does not count; inside a
        :meth:`phase` all ranks weigh the same.

        Args:
            values: Numbers or one-element tensors by name, for names that are no keyword: ``{"train/loss": loss}``.
            reduce: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"`` over ranks, for all values of this call.
            **more_values: The same by keyword.

        Raises:
            BadInputError: A value is no single number, a name is empty or longer than 250 characters, or no such rule.
            RanksDisagreeError: At a later boundary, on all ranks: some rank did not log what the others did.
        """
        self._metrics.log(self.step, {**(values or {}), **more_values}, reduce, self._weight, self._num_peers)

    def report(self, values: Values = None, /, *, reduce: Reduce = "mean", **more_values: Any) -> None:
        """Reports results at :attr:`step`, such as the objective; pruners see them. Fetches tensors at once.

        In a gang all ranks call it; it waits for them and makes one value of theirs, as :meth:`log` does. Of texts rank
        0's count.

        Args:
            values, reduce, **more_values: As with :meth:`log`; texts too.

        Raises:
            BadInputError: A value is neither a single number nor text, or no such rule.
            RanksDisagreeError: Another rank reports something else, or is somewhere else.
        """
        together = {**(values or {}), **more_values}
        announced = self._metrics.announce(self.step, together, reduce, self._weight, self._num_peers)
        self._agreement.meet(Spot.REPORT, self.step)
        self._metrics.report(announced, self._phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what happens inside, for the ledger and for the platform's patience.

        Args:
            name: A ledger category such as ``eval``, ``generation`` or ``compile``; another name counts as ``compute``.
        """
        before, self._phase = self._phase, name
        self._link.push(self.step, name)
        try:
            with self._ledger.within(name if name in CATEGORIES else "compute"):
                yield
        finally:
            self._phase = before
            self._link.push(self.step, before)

    def save(self) -> SaveHandle:
        """Checkpoints: at once between loops, else at the next boundary. All ranks must call it.

        Returns as soon as training may go on: what an optimizer owns is copied while the next forward and backward run,
        and all is written by another process. While the save before is still being written, a new one waits: in the
        body of a loop for a later boundary, between loops here.

        Returns:
            A handle that tells whether the state is ``staged`` and ``committed``, and whose ``result()`` waits for
            that. A failure that nobody asks for is raised at the next boundary, or at the end of the run.

        Raises:
            SaveFailedError: Something in a tracked state cannot be saved.
        """
        handle = self._saves.request()
        if not self._cursor.in_body:
            self._begin()
            self._cursor.settle()
            self._saves.now("asked")
        return handle

    def check(self) -> None:
        """A boundary inside a long phase, such as an evaluation: may leave, if the run was told to.

        Between loops it is a full boundary. Inside a loop's body the update is not finished, so nothing is saved here:
        a stop is obeyed at once, a yield only when waiting for the next boundary would outlast the grace.
        """
        if not self._cursor.in_body:
            self._begin()
            self._cursor.settle()
            self._boundary()
            return
        leave, remaining_seconds = self._orders.leave()
        if leave is Leave.STOP or (leave is not Leave.NO and remaining_seconds < MIN_GRACE_SECONDS):
            self._leave(leave, save=False)

    def every(self, updates: int | None = None, seconds: float | None = None) -> bool:
        """Whether something periodic is due in this round of the loop.

        Args:
            updates: True in the last micro-batch of each such update; a pure function of :attr:`step`.
            seconds: True when so much productive time has passed since the last time. In gangs rank 0's clock is not
                shared: use ``updates`` where ranks must agree.

        Raises:
            BadInputError: Not exactly one of both, or not positive.
        """
        amount = updates if seconds is None else seconds
        if (updates is None) == (seconds is None) or amount is None or amount <= 0:
            raise BadInputError("every() takes updates= or seconds=, above 0", hint="Like run.every(updates=500).")
        if seconds is not None:
            return self._metrics.due(seconds)
        return self.update_now and self.step % int(amount) == 0

    def seeds(self, ids: Sequence[int | str]) -> list[int]:
        """A seed for each id, a pure function of it and the trial's seed: for generation that must be repeatable."""
        return [rng.derive(self.seed, "generation", item) for item in ids]

    def fingerprint(self) -> str:
        """Hash of every tracked tensor; equal for equal weights, moments and buffers."""
        return self._saver.fingerprint()

    @property
    def _weight(self) -> float:
        return 1.0 if self._phase else self._cursor.weight

    @property
    def _num_peers(self) -> int:
        return self._cursor.num_peers or self._arrangement.num_peers

    # -- where it is ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates done, counting the one that the loop's body is at: 1 in the first update, and so on."""
        return self._cursor.shown_step

    @property
    def update_now(self) -> bool:
        """Whether the current batch is the last micro-batch of its update."""
        return self._cursor.completes

    @property
    def accumulate(self) -> int:
        """Micro-batches per update on each rank."""
        return self._cursor.batch.accumulate if self._cursor.batch is not None else 1

    # -- loops ------------------------------------------------------------------------------------------------------

    def batches(
        self, loader: DataLoader, epochs: int = 1, *, seconds: float | None = None, name: str = "batches"
    ) -> Iterator[Any]:
        """Batches of a loader, from exactly where the run stopped; a boundary lies behind every update.

        Args:
            loader: A :class:`overnight.trainer.DataLoader`.
            epochs: Ends after so many.
            seconds: Ends after so much productive time, which survives pre-emption; ``epochs`` is then no limit.
            name: Tells loops apart whose order in the script changes.

        Raises:
            BadInputError: The loader is of another kind.
            DatasetChangedError: The data is not what it was at the save.
        """
        if not isinstance(loader, DataLoader):
            raise BadInputError(
                f"run.batches() takes a trainer.DataLoader, not a {type(loader).__name__}",
                hint="It has the same arguments as torch's: from overnight.trainer import DataLoader.",
            )
        return self._iterate_batches(loader, None if seconds is not None else epochs, seconds, name)

    def _iterate_batches(
        self, loader: DataLoader, epochs: int | None, seconds: float | None, name: str
    ) -> Iterator[Any]:
        self._cursor.settle()
        with self._loops.enter(name, "batches") as loop:
            if loop.state["done"]:
                return
            self._cursor.bind(loader)
            if loop.state["first_epoch"] is None:
                loop.state["first_epoch"] = self._cursor.open_epoch(loader)
            last = None if epochs is None else loop.state["first_epoch"] + epochs
            self._cursor.declare(loader, last)
            self._at_entry()
            epoch, position = self._cursor.place(loader, loop.state["first_epoch"])
            while last is None or epoch < last:
                if (yield from self._rest_of_epoch(loop, loader, epoch, position, seconds)):
                    break
                epoch, position = epoch + 1, 0

    def _rest_of_epoch(
        self, loop: Loop, loader: DataLoader, epoch: int, position: int, seconds: float | None
    ) -> Generator[Any, None, bool]:
        """The batches from a position to the end of the epoch; returns whether the loop's time is over."""
        batches = loader.micro_batches(epoch, position)
        since = time.monotonic()
        while True:
            with self._ledger.within("data_wait"):
                batch = next(batches, None)
            if batch is None:
                break
            self._begin()
            yield from self._cursor.hand_out(Pending(loop, loader, batch, batch.last_of_update), batch.data)
            if not batch.last_of_update:
                continue
            over = False
            if seconds is not None:
                loop.state["seconds"] += time.monotonic() - since
                over = loop.state["seconds"] >= seconds
            is_last = loader.place_at(epoch, batch.end)[0] != epoch
            ended = self._boundary(epoch_end=is_last and not self._loops.inside("epochs"), over=over)
            if seconds is not None and ended == loop.number:
                loop.state["done"] = True
                self._cursor.leave_epoch(loader, batch, consumed=True)
                return True
            since = time.monotonic()
        if loader.epoch == epoch and loader.ack == "auto":
            loader.seek(epoch + 1, 0)
        return False

    def steps(self, n: int, *, name: str = "steps") -> Iterator[int]:
        """A loop of ``n`` updates without a loader; yields :attr:`step`. A boundary lies behind each."""
        self._cursor.settle()
        with self._loops.enter(name, "steps") as loop:
            self._at_entry()
            while loop.state["count"] < n and not loop.state["done"]:
                self._begin()
                yield from self._cursor.hand_out(Pending(loop), self._cursor.step + 1)
                self._boundary()

    def epochs(self, n: int, *, name: str = "epochs") -> Iterator[int]:
        """A loop around other loops; yields 0 to ``n - 1``. A boundary, and the end of an epoch, lies behind each."""
        self._cursor.settle()
        with self._loops.enter(name, "epochs") as loop:
            while loop.state["count"] < n and not loop.state["done"]:
                self._at_entry()
                try:
                    yield loop.state["count"]
                except GeneratorExit:
                    loop.state["done"] = True
                    raise
                self._begin()
                self._cursor.settle()
                loop.next_round()
                self._boundary(epoch_end=True)

    def _at_entry(self) -> None:
        """Where a loop is entered: a resumed run is back at its place if these very loops were open at the save."""
        if not self.resumed or self._loops.was_here:
            self._begin()

    def _begin(self) -> None:
        """Sets the random state, last of all: where the run was saved, at latest before its first round."""
        if self._ready:
            return
        self._ready = True
        restored = self._origin.restored
        if restored is not None and self._is_arranged_as(restored):
            rng.restore(restored.state(RNG))
        else:
            rng.rederive(self.seed, self._cursor.step, self._arrangement.share.rank)
        if restored is not None and GRADIENTS in restored.names:
            self._put_gradients_back(restored)
        if restored is not None and self.rank == 0:
            tell_differences(restored.manifest, self.device, self.world_size)
            for name in self._saver.missing():
                complain(f"{name!r} is in {restored.manifest.name}, but this run does not track it")
        if restored is not None:
            restored.release()
        if self.rank == 0 and self.world_size > buckets.COMMUTATIVE:
            text = buckets.warning(self._saver.tracked.values(), untracked.script_frames())
            if text is not None:
                complain(text)

    def _is_arranged_as(self, restored: Restored) -> bool:
        """Whether each rank is the one of that number at the save, with the same part of the samples."""
        same_peers = self._saved_peers == self._arrangement.peers and self._cursor.is_divided_as_saved
        return restored.manifest.world_size == self.world_size and same_peers

    def _put_gradients_back(self, restored: Restored) -> None:
        """Goes on in the middle of an accumulation by the script; each rank's gradients are of its own samples."""
        if not self._is_arranged_as(restored):
            if self.rank == 0:
                complain(f"{restored.manifest.name} was saved in the middle of an accumulation; its gradients are lost")
            return
        self._saver.put_gradients_back(restored.state(GRADIENTS))

    # -- boundaries -------------------------------------------------------------------------------------------------

    def _boundary(self, *, epoch_end: bool = False, over: bool = False) -> int:
        """Between two updates: agree, leave, save, send. Returns the number of the loop whose time is over."""
        leave, _ = self._orders.leave()
        number = self._loops.innermost.number if over else 0
        timed = self.rank == 0 and self._saver.tracks and self._policy.due_by_time()
        save, send = self._orders.take_save() or timed, self._metrics.wants_reduction()
        wishes = self._saves.wishes(leave=leave, save=save, over=number, send=send)
        agreed = self._agreement.exchange(wishes, self._cursor.step)
        self._metrics.advance(start=bool(agreed.send))
        due = self._policy.due_by_count(self._cursor.step, epoch_end=epoch_end) and self._saver.tracks
        if agreed.leave:
            self._gather(Spot.BOUNDARY)
            self._leave(Leave(agreed.leave), save=agreed.leave != Leave.STOP)
        self._saves.at_boundary(agreed, due=due)
        if self._metrics.flush(self._cursor.step, self._phase):
            self._record.flush()
            if self.rank == 0:
                self._reached.note(self._cursor.step)
        return agreed.over

    def _gather(self, spot: Spot, wishes: Wishes | None = None) -> Wishes:
        """Where all ranks wait for each other anyway: makes sure that they do, and brings in all that they logged."""
        met = self._agreement.meet(spot, self._cursor.step, wishes)
        self._metrics.gather()
        return met

    def _meet_at_save(self, wishes: Wishes) -> Wishes:
        return self._gather(Spot.SAVE, wishes)

    def _name_untracked(self) -> None:
        """Once, at the first save: what would not be as before in a resumed run."""
        if not self._named_untracked and self.rank == 0 and (text := untracked.warning(self._saver.tracked)):
            complain(text)
        self._named_untracked = True

    def _moment(self, kind: Kind) -> Moment:
        """This moment as a save needs it. What led to it is on its way to the supervisor, and safe in the record."""
        self._name_untracked()
        self._metrics.flush(self._cursor.step, self._phase, everything=True)
        self._record.flush()
        own = {
            "step": self._cursor.step,
            "peers": self._arrangement.peers,
            "loops": self._loops.export(),
            "loaders": self._cursor.loader_states(),
        }
        return Moment(
            step=self._cursor.step,
            kind=kind,
            internal={RUN: own, RNG: rng.capture()},
            position={"loops": self._loops.path, "loaders": self._cursor.places()},
            metrics=self._metrics.numbers(),
            facts={**envelope(self.device, self.world_size), "retention": self._retention.to_json()},
        )

    def _tell_before_publishing(self) -> None:
        """Whatever led to a checkpoint is known to the supervisor before the checkpoint is."""
        if self.rank == 0:
            self._link.flush()

    def _leave(self, leave: Leave, *, save: bool) -> None:
        """Leaves by an exception, after a save where one is wanted and possible.

        Raises:
            Left: Always.
        """
        self._agreement.drain()
        saved = False
        if save and self._saver.tracks:
            try:
                self._saves.finish("yield", self._grace_seconds())
                saved = True
            except CheckpointError as error:
                complain(f"leaving without a save: {error}")
        kind = {Leave.STOP: Stopped, Leave.INTERRUPT: Interrupted}.get(leave, Yielded)
        self._link.send("/v1/leaving", {"why": kind.why, "saved": saved, "step": self._cursor.step})
        if self.rank == 0 and self._origin.environment.alone:
            where = f"; the same command goes on from there ({self._origin.place})" if saved else ""
            complain(f"left at step {self._cursor.step}{where}")
        raise kind(self._cursor.step, saved=saved, reason=self._orders.reason)

    def _grace_seconds(self) -> float | None:
        """How long a save may take before this process is killed; alone it is not."""
        if self._origin.environment.alone:
            return None
        return max(MIN_SAVE_SECONDS, self._orders.leave()[1] - LEAVE_SECONDS)

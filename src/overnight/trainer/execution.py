"""The run: what a training script holds on to while the platform starts, stops, moves and resumes it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overnight.core.errors import BadInputError, CheckpointError
from overnight.trainer import rng, untracked
from overnight.trainer.agreement import Agreement, Spot
from overnight.trainer.boundary import Every, Policy, Signals
from overnight.trainer.checkpoint.handle import SaveHandle
from overnight.trainer.checkpoint.pipeline import Moment
from overnight.trainer.checkpoint.reader import complain
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.writing.order import Kind
from overnight.trainer.crossing import Boundaries
from overnight.trainer.cursor import Cursor, Reader
from overnight.trainer.data.loader import DataLoader
from overnight.trainer.ending import Ending
from overnight.trainer.envelope import envelope
from overnight.trainer.exits import Left, describe, is_success
from overnight.trainer.first_round import FirstRound
from overnight.trainer.journal import Reduce, Values
from overnight.trainer.leaving import Departure
from overnight.trainer.link import Link
from overnight.trainer.loops import Loops
from overnight.trainer.meshes import Arrangement, join_group_of_one
from overnight.trainer.metrics import Metrics
from overnight.trainer.orders import Orders
from overnight.trainer.own_state import OwnState, Saved
from overnight.trainer.owner import Owner
from overnight.trainer.params import Params
from overnight.trainer.phases import Ledger, Reached, seconds_since_launch
from overnight.trainer.prospect import Prospect
from overnight.trainer.rounds import Rounds
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
)
from overnight.trainer.telling import Telling
from overnight.trainer.warm import WarmStart, What

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATE = "state"


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
        self._named_untracked = False

    # -- beginning and end ------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        if self._entered:
            raise BadInputError("a run can be entered once", hint="Make another with trainer.run().")
        self._entered = True
        self._owner = Owner()
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
        self.state = {}
        self._saver.track(STATE, self.state)
        self._go_on_from(Saved.read(self._origin.restored))
        rng.seed_all(rng.derive(self.seed, "initial"))
        self._ledger.switch("compute")

    def _go_on_from(self, saved: Saved) -> None:
        """Puts together what counts, tells, saves, leaves, loops and ends, each where it was."""
        self._first_step = saved.step
        self._record = open_record(self._origin)
        reader = Reader(self.rank, self.world_size, self.seed)
        reached = Reached(self.trial_dir, self._attempt_dir)
        self._cursor = Cursor(reader, self._record, self._ledger, reached, saved.step, saved.loaders, self._owner)
        loops = Loops(saved.loops, saved.loop_path)
        self._own_state = OwnState(self._cursor, loops, self._arrangement)
        self._telling = Telling(
            self._metrics,
            self._agreement,
            self._link,
            self._ledger,
            self._cursor,
            self._arrangement,
            self._record,
            reached if self.rank == 0 else None,
        )
        self._saves = Saves(
            self._saver,
            self._policy,
            self._ledger,
            self._link,
            moment=self._moment,
            meet=partial(self._telling.gather, Spot.SAVE),
            prospect=partial(Prospect, self._origin.place, self._agreement.lost),
            rank=self.rank,
            world_size=self.world_size,
        )
        self._departure = Departure(self._origin, self._orders, self._agreement, self._saves, self._cursor, self._link)
        self._boundaries = Boundaries(
            self._orders, self._agreement, self._departure, self._saves, self._telling, self._cursor, loops
        )
        self._first_round = FirstRound(
            self._origin, saved, self._saver, self._cursor, self._arrangement, device=self.device, seed=self.seed
        )
        self._rounds = Rounds(
            loops, self._cursor, self._ledger, self._first_round, self._boundaries, resumed=self.resumed
        )
        self._ending = Ending(
            self._origin, self._first_step, self._cursor, self._telling, self._metrics, self._saver, self._saves
        )

    def _tell_before_publishing(self) -> None:
        """Whatever led to a checkpoint is known to the supervisor before the checkpoint is."""
        if self.rank == 0:
            self._link.flush()

    def _moment(self, kind: Kind) -> Moment:
        """This moment as a save needs it, once everything that led to it is told."""
        self._name_untracked()
        self._telling.send_all()
        return Moment(
            step=self._cursor.step,
            kind=kind,
            internal=self._own_state.capture(),
            position=self._own_state.position(),
            metrics=self._metrics.numbers(),
            facts={**envelope(self.device, self.world_size), "retention": self._retention.to_json()},
        )

    def _name_untracked(self) -> None:
        """Once, at the first save: what would not be as before in a resumed run."""
        if not self._named_untracked and self.rank == 0 and (text := untracked.warning(self._saver.tracked)):
            complain(text)
        self._named_untracked = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._owner.is_here:
            return  # a forked child has nothing to end: the run goes on in the process that entered it
        self._ledger.switch("shutdown")
        try:
            if is_success(error):
                self._ending.finish()
            elif error is not None and not isinstance(error, Left | SystemExit):
                self._link.send("/v1/error", describe(error, self.step))
        except Exception as late:
            self._link.send("/v1/error", describe(late, self.step))
            raise
        finally:
            try:
                self._close(error)
            finally:
                self._owner.end()

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
        failure = self._saves.close(self._departure.late_seconds(error))
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
        self._owner.require_running()
        self._telling.log({**(values or {}), **more_values}, reduce)

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
        self._owner.require()
        self._telling.report({**(values or {}), **more_values}, reduce)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what happens inside, for the ledger and for the platform's patience.

        Args:
            name: A ledger category such as ``eval``, ``generation`` or ``compile``; another name counts as ``compute``.
        """
        with self._telling.phase(name):
            yield

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
        self._owner.require()
        handle = self._saves.request()
        if not self._cursor.in_body:
            self._first_round.prepare()
            self._cursor.settle()
            self._saves.now("asked")
        return handle

    def check(self) -> None:
        """A boundary inside a long phase, such as an evaluation: may leave, if the run was told to.

        Between loops it is a full boundary. Inside a loop's body the update is not finished, so nothing is saved here:
        a stop is obeyed at once, a yield only when waiting for the next boundary would outlast the grace.
        """
        self._owner.require()
        if not self._cursor.in_body:
            self._first_round.prepare()
            self._cursor.settle()
            self._boundaries.cross()
            return
        self._departure.leave_body_if_told()

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
        return self._rounds.batches(loader, None if seconds is not None else epochs, seconds, name)

    def steps(self, n: int, *, name: str = "steps") -> Iterator[int]:
        """A loop of ``n`` updates without a loader; yields :attr:`step`. A boundary lies behind each."""
        return self._rounds.steps(n, name)

    def epochs(self, n: int, *, name: str = "epochs") -> Iterator[int]:
        """A loop around other loops; yields 0 to ``n - 1``. A boundary, and the end of an epoch, lies behind each."""
        return self._rounds.epochs(n, name)

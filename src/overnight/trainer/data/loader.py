"""A data loader that continues exactly where it stopped, at any number of ranks.

It looks like ``torch.utils.data.DataLoader`` and reads samples with torch's workers. What differs is that the order is
a pure function of (seed, epoch, position), that its state is one global position instead of one count per rank, that
random augmentation is a function of the position too, and that a batch counts as consumed when the next one is
requested, not when it was read ahead.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import default_collate

from overnight.core.errors import BadInputError, DataError, IndivisibleBatchError
from overnight.trainer.data.arguments import require_choice, require_map_style, require_sizes
from overnight.trainer.data.augment import Fetched, SampleReader, Task
from overnight.trainer.data.binding import Binding
from overnight.trainer.data.content import Content
from overnight.trainer.data.ordering import Ordering
from overnight.trainer.data.position import Block, Geometry, Tail, divide, weights_of, world_sizes
from overnight.trainer.data.shares import Share, share_of
from overnight.trainer.data.state import LoaderState
from overnight.trainer.data.workers import BatchReader, WorkerOptions
from overnight.trainer.rng import derive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this rank, with its place in the order.

    Attributes:
        data: What the collate function made.
        indices: Data set indices of this rank's samples, int64, padding included.
        epoch: Epoch, from 0.
        position: Samples of the epoch that all ranks consumed before the update that this batch is part of.
        end: The same after that update.
        first: Position of this batch's first sample; the others follow without a gap.
        accumulate: Micro-batches per update.
        index_in_update: Which of them this is, from 0.
        last_of_update: Whether the update is complete after it.
        weights: float32 of shape ``[len(indices)]``, 0 for padding; None unless the loader pads.
    """

    data: Any
    indices: NDArray[np.int64]
    epoch: int
    position: int
    end: int
    first: int
    accumulate: int
    index_in_update: int
    last_of_update: bool
    weights: torch.Tensor | None


class DataLoader:
    """Batches of a map-style data set, resumable at any global position.

    ``batch_size`` alone has torch's meaning: samples per rank, every batch an update. ``global_batch_size`` fixes the
    samples of an update for all ranks together, so that the number of ranks may change between attempts; the micro
    batch stays and gradient accumulation adapts.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``.
        batch_size: Samples per rank and update; 1 if neither size is given.
        global_batch_size: Samples per update over all ranks.
        micro_batch_size: Samples per rank and backward pass; None takes a rank's whole share at once.
        shuffle: A new permutation in each epoch.
        seed: Of order and augmentation; None derives it from the run's seed and ``name``.
        num_workers: Processes that read ahead; 0 reads in this one. The bits are the same.
        collate_fn: Makes a batch of a list of samples; torch's default otherwise.
        tail: What happens to the samples that do not fill the last global batch: ``"drop"``, or ``"pad"`` with samples
            of weight 0 (see :attr:`sample_weight`). One rank with ``batch_size`` alone keeps its last short batch.
        sampler: Gives the order of an epoch instead; materialised once an epoch with its own random numbers.
        weights: One weight per sample: draws with replacement in proportion.
        mixture: One share per part of a ``ConcatDataset``: every epoch takes exactly so much of each, and each part is
            gone through completely before any of its samples comes again.
        num_samples: Draws per epoch, with ``weights`` or ``mixture`` only; the data set's length otherwise.
        drop_last: Drop the last short batch on one rank too.
        pure: The data set and ``collate_fn`` draw no random numbers: saves 12 us per sample.
        ack: ``"auto"``: a batch is consumed when the next one is requested. ``"manual"``: when :meth:`advance` says so,
            oldest first; what was given but not acknowledged before a save is given again after a resume.
        mesh: Ranks along its data-parallel dimensions (``dp``, ``dp_replicate``, ``dp_shard``, ``fsdp``, or all of a
            mesh with one dimension, like ``mesh["dp"]``) get different samples, their peers along the others (``tp``,
            ``cp``, ``pp``) the same. None: every rank gets its own. Sizes per rank are then sizes per group of peers.
        name: Distinguishes the loaders of a run.
        fingerprint: Identity of the data's content. None hashes the first, middle and last sample.
        allow_changed: Continue although the saved state belongs to other data or another order.
        pin_memory: As torch.
        persistent_workers: As torch.
        prefetch_factor: As torch.
        multiprocessing_context: As torch.
        worker_init_fn: As torch.
        timeout: As torch, seconds.

    Raises:
        BadInputError: Arguments that exclude each other, a data set that is not map-style, or a mesh of which it cannot
            be told which ranks are peers.
        IndivisibleBatchError: The global batch does not divide by ranks x micro batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Literal["drop", "pad"] = "drop",
        sampler: Iterable[Any] | None = None,
        weights: ArrayLike | None = None,
        mixture: Sequence[float] | None = None,
        num_samples: int | None = None,
        drop_last: bool = False,
        pure: bool = False,
        ack: Literal["auto", "manual"] = "auto",
        mesh: "DeviceMesh | None" = None,
        name: str = "main",
        fingerprint: str | None = None,
        allow_changed: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0.0,
    ) -> None:
        require_map_style(dataset)
        require_sizes(batch_size, global_batch_size, micro_batch_size)
        require_choice("tail", tail, ("drop", "pad"))
        require_choice("ack", ack, ("auto", "manual"))
        self._ordering = Ordering(
            dataset, shuffle=shuffle, sampler=sampler, weights=weights, mixture=mixture, num_samples=num_samples
        )
        self.dataset = dataset
        self.batch_size = 1 if batch_size is None and global_batch_size is None else batch_size
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn or default_collate
        self.drop_last = drop_last
        self.ack = ack
        self.name = name
        self.allow_changed = allow_changed
        self._global_batch_size = global_batch_size
        self._share = None if mesh is None else share_of(mesh)
        self._tail = tail
        self._explicit_seed = seed
        self._adopted_seed: int | None = None
        self._length = len(dataset)
        self._pure = pure
        self._options = WorkerOptions(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )
        self._content = Content(dataset, fingerprint, num_workers, name)
        self._bound: Binding | None = None
        self._num_peers = 1
        self._epoch, self._position = 0, 0
        self._is_abandoned = False
        self._current: MicroBatch | None = None

    def bind(self, *, rank: int | None = None, world_size: int | None = None, seed: int | None = None) -> None:
        """Says who reads: called by the run before use, else on first use with what the environment says.

        Args:
            rank: This rank; ``RANK`` or 0. With a mesh, that tells which samples it reads.
            world_size: Number of ranks; ``WORLD_SIZE`` or 1.
            seed: The run's seed; ``OVERNIGHT_SEED`` or 0.

        Raises:
            BadInputError: There is no such rank, or the mesh is one of other ranks.
            IndivisibleBatchError: The global batch does not divide by ranks x micro batch.
            DataError: The data set is too small for a single update.
        """
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise BadInputError(f"rank {rank} is not one of {world_size} rank(s)", hint="Ranks count from 0.")
        share = self._share or Share(rank, world_size)
        self._num_peers = share.num_peers(world_size)
        self._bind(self._geometry(share), self._seed_from(seed))

    def _bind(self, geometry: Geometry, seed: int) -> None:
        self._close_reader()
        self._bound = Binding(geometry, self._ordering.order(seed), seed)
        self._epoch_length(self._epoch)

    def _geometry(self, share: Share) -> Geometry:
        num_ranks = share.num_ranks
        if self._global_batch_size is None:
            micro, accumulate = self.batch_size or 1, 1
        else:
            noun = "rank" if self._share is None else "data-parallel rank"
            micro, accumulate = divide(self._global_batch_size, self.micro_batch_size, num_ranks, noun)
        keeps = self._global_batch_size is None and num_ranks == 1 and not self.drop_last
        tail = Tail.PAD if self._tail == "pad" else Tail.KEEP if keeps else Tail.DROP
        return Geometry(micro, accumulate, share.rank, num_ranks, tail)

    def _seed_from(self, run_seed: int | None) -> int:
        if self._adopted_seed is not None:
            return self._adopted_seed
        if self._explicit_seed is not None:
            return self._explicit_seed
        if run_seed is None:
            run_seed = int(os.environ.get("OVERNIGHT_SEED", "0"))
        return derive(run_seed, "loader", self.name)

    @property
    def _ready(self) -> Binding:
        if self._bound is None:
            self.bind()
        assert self._bound is not None
        return self._bound

    def _epoch_length(self, epoch: int) -> int:
        bound = self._ready
        length = bound.order.length(epoch)
        if length and not bound.geometry.num_updates(length):
            raise DataError(
                f"an epoch has {length} sample(s), fewer than the global batch of {bound.geometry.global_batch}: "
                "every epoch would be empty",
                hint='Make the batch smaller, or pass tail="pad".',
            )
        return length

    @property
    def rank(self) -> int:
        """This rank among those that read different samples."""
        return self._ready.geometry.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that read different samples."""
        return self._ready.geometry.world_size

    @property
    def num_peers(self) -> int:
        """Number of ranks that read the samples that this one does, itself included; 1 without a mesh."""
        return self._num_peers

    @property
    def accumulate(self) -> int:
        """Micro-batches per update on each rank."""
        return self._ready.geometry.accumulate

    @property
    def global_batch(self) -> int:
        """Samples per update, all ranks together."""
        return self._ready.geometry.global_batch

    @property
    def fitting_world_sizes(self) -> list[int]:
        """Values of :attr:`world_size` with which this loader can continue, ascending."""
        if self._global_batch_size is None:
            return [self.world_size]
        return world_sizes(self._global_batch_size, self.micro_batch_size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the current epoch consumes over all ranks, after the tail rule, padding not counted."""
        return self._ready.geometry.num_samples(self._ready.order.length(self._epoch))

    @property
    def updates_per_epoch(self) -> int:
        """Updates in the current epoch."""
        return self._ready.geometry.num_updates(self._ready.order.length(self._epoch))

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once in an epoch (weights, user samplers)."""
        return self._ready.order.repeats

    @property
    def seed(self) -> int:
        """The seed of order and augmentation."""
        return self._ready.seed

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the current epoch that all ranks together have consumed."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        """Moves within the current epoch, as :meth:`seek` does."""
        self.seek(self._epoch, position)

    @property
    def current(self) -> MicroBatch | None:
        """The micro-batch handed out last."""
        return self._current

    @property
    def sample_weight(self) -> torch.Tensor:
        """Weight of each sample of the current micro-batch, float32: 0 for padding, else 1.

        Raises:
            DataError: No batch has been handed out yet.
        """
        if self._current is None:
            raise DataError("there is no current batch", hint="Read sample_weight inside the loop over the loader.")
        if self._current.weights is None:
            return torch.ones(len(self._current.indices))
        return self._current.weights

    def __len__(self) -> int:
        """Batches that this rank gets in the current epoch."""
        return self.updates_per_epoch * self.accumulate

    def seek(self, epoch: int, position: int) -> None:
        """Moves to a global position of an epoch; one past the last update is the start of the next epoch (C9)."""
        if epoch < 0 or position < 0:
            raise DataError(f"epoch {epoch}, position {position} is not a place", hint="Both count from 0.")
        length = self._epoch_length(epoch)
        if position > length:
            raise DataError(
                f"position {position} is beyond epoch {epoch}, which has {length} sample(s)",
                hint="Was the state saved with another data set?",
            )
        self._epoch, self._position = self.place_at(epoch, position)
        self._is_abandoned = False

    def place_at(self, epoch: int, position: int) -> tuple[int, int]:
        """Epoch and position of the next update; behind an epoch's last one that is the start of the next epoch."""
        is_over = position and self._ready.geometry.update_end(position, self._epoch_length(epoch)) is None
        return (epoch + 1, 0) if is_over else (epoch, position)

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of an epoch, as with torch's distributed sampler."""
        self.seek(epoch, 0)

    def advance(self, num_updates: int = 1) -> None:
        """Counts updates as consumed: the acknowledgement of ``ack="manual"``.

        In a run, call it inside a loop's body, on all ranks alike: the step of that body is the one that consumed them.

        Raises:
            DataError: The data set is empty.
        """
        for _ in range(num_updates):
            end = self._ready.geometry.update_end(self._position, self._epoch_length(self._epoch))
            if end is None:
                raise DataError("an empty data set has no update to advance by", hint="Check the data set's length.")
            self.seek(self._epoch, end)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch, or the whole next one if the last iteration was left early.

        With ``ack="auto"`` the loader's position follows. Nothing is read before the first batch is requested, so an
        iterator made before :meth:`load_state_dict` starts where the state says.
        """
        if self._is_abandoned and self._position:
            self.seek(self._epoch + 1, 0)
        epoch = self._epoch
        for batch in self.micro_batches(epoch, self._position):
            yield batch.data
            if self.ack == "auto" and batch.last_of_update:
                self.seek(epoch, batch.end)
                self._is_abandoned = self._epoch == epoch

    def micro_batches(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from a global position to the end of the epoch. Does not move the loader.

        Args:
            epoch: Epoch, from 0.
            start: Samples of it that are consumed already.

        Raises:
            DataError: The data set is too small for a single update, or a worker died.
            DatasetChangedError: The content is not that of the loaded state; raised before the first batch.
        """
        bound = self._ready
        length = self._epoch_length(epoch)
        planned: deque[tuple[Block, Task]] = deque()

        def tasks() -> Iterator[Task]:
            for step in bound.plan(epoch, start, length, probe=self._content.is_found_by_worker):
                planned.append(step)
                yield step[1]

        for data in self._reader().read(tasks()):
            block, task = planned.popleft()
            if isinstance(data, Fetched):
                self._content.found(data.content)
                data = data.data
            weights = weights_of(block, length) if bound.geometry.tail is Tail.PAD else None
            self._current = MicroBatch(
                data=data,
                indices=task.indices,
                epoch=epoch,
                position=block.position,
                end=block.end,
                first=block.first,
                accumulate=bound.geometry.accumulate,
                index_in_update=block.index_in_update,
                last_of_update=block.last_of_update,
                weights=None if weights is None else torch.from_numpy(weights),
            )
            yield self._current

    def _reader(self) -> BatchReader:
        bound = self._ready
        if bound.reader is None:
            samples = SampleReader(
                self.dataset, self.collate_fn, seeded=not self._pure, isolate=self._options.num_workers == 0
            )
            bound.reader = BatchReader(samples, self._options, derive(bound.seed, "workers", bound.geometry.rank))
        return bound.reader

    def _close_reader(self) -> None:
        if self._bound is not None and self._bound.reader is not None:
            self._bound.reader.close()
            self._bound.reader = None

    def close(self) -> None:
        """Ends persistent workers. Other workers end with the iteration that started them."""
        self._close_reader()

    def state_dict(self) -> dict[str, Any]:
        """The place in the order, the same on every rank: integers, strings and None only.

        With workers, the content of the data set is hashed in the first task of an iteration; a state taken before the
        first batch has no ``fingerprint``.
        """
        bound = self._ready
        return LoaderState(
            name=self.name,
            epoch=self._epoch,
            position=self._position,
            dataset_length=self._length,
            fingerprint=self._content.fingerprint(),
            global_batch=bound.geometry.global_batch,
            world_size=bound.geometry.world_size,
            seed=bound.seed,
            sampler=bound.order.kind,
            order=bound.order.fingerprint(self._epoch),
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` was taken, at the same global position whatever the number of ranks is.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            DatasetChangedError: The data set has another length or content, or the order is another one, and
                ``allow_changed`` is not set. With workers the content is compared before the first batch instead.
            IndivisibleBatchError: The number of ranks changed and only ``batch_size`` is given.
            DataError: The state is malformed.
        """
        saved = LoaderState.from_dict(state)
        bound = self._ready
        if self._explicit_seed is None and saved.seed != bound.seed:
            self._adopted_seed = saved.seed
            self._bind(bound.geometry, saved.seed)
        if not self.allow_changed:
            self._require_unchanged(saved)
        self.seek(saved.epoch, min(saved.position, self._epoch_length(saved.epoch)))

    def _require_unchanged(self, saved: LoaderState) -> None:
        bound = self._ready
        if self._global_batch_size is None and saved.world_size != bound.geometry.world_size:
            raise IndivisibleBatchError(
                f"the state was saved with {saved.world_size} rank(s) of batch_size={self.batch_size}, "
                f"on {bound.geometry.world_size} the update would be of another size",
                hint=f"Pass global_batch_size={saved.global_batch}, which keeps the update the same at any number.",
            )
        saved.require_same("samples", saved.dataset_length, self._length)
        saved.require_same("an order that is", saved.sampler, bound.order.kind)
        saved.require_same("the seed", saved.seed, bound.seed)
        saved.require_same("an order with hash", saved.order, bound.order.fingerprint(saved.epoch))
        self._content.expect(saved.fingerprint)

"""Stages the state of a boundary: at once what anything may change, in overlap what only an optimizer's step changes.

Whoever stages must know that nobody reads the arena. From then on the stager keeps the state of that moment intact: a
hook in front of every optimizer's step, in whichever thread and of whichever kind (fused, in backward, a subclass with
a step of its own), waits until the copy is complete.
"""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.staging.arena import Arena, no_memory
from overnight.trainer.checkpoint.staging.crew import Cores, Crew
from overnight.trainer.checkpoint.staging.device import DeviceCopies, DeviceCopy
from overnight.trainer.checkpoint.staging.layout import Layout, Way, choose_ways, lay_out, signature_of
from overnight.trainer.checkpoint.staging.ownership import freed, frozen_memory, owned_memory
from overnight.trainer.checkpoint.staging.probe import Probe, scratch_bytes
from overnight.trainer.checkpoint.staging.versions import Versions
from overnight.trainer.checkpoint.staging.worker import Worker
from overnight.trainer.checkpoint.state import Encoded
from overnight.trainer.checkpoint.writing.order import Pieces

SPARE = 1.02
"""Room for a state that grows a little; it costs memory only when it is used."""


@dataclass
class Staged:
    """A state in the arena, or what has become of it.

    Attributes:
        arena: Where; untouched until the next state is staged.
        pieces: What.
        changed: Names of the objects whose content was changed outside an optimizer's step while it was copied. The
            arena then holds no moment's state.
        error: Why it could not be copied.
    """

    arena: Arena
    pieces: Pieces
    changed: list[str] = field(default_factory=list)
    error: Exception | None = None

    @property
    def good(self) -> bool:
        """Whether the arena holds the state of the boundary."""
        return not self.changed and self.error is None


@dataclass(frozen=True)
class _Basis:
    """What the choice of ways depends on beside addresses.

    Attributes:
        form: Of the state.
        params: Identities of what the optimizers change.
        restless: Names of objects that are copied at once.
    """

    form: object | None
    params: list[int]
    restless: frozenset[str]

    @classmethod
    def of(cls, encoded: Encoded, optimizers: Sequence[torch.optim.Optimizer], restless: Collection[str]) -> "_Basis":
        groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
        return cls(encoded.form, [id(param) for params in groups for param in params], frozenset(restless))


class Stager:
    """The staging memory of a rank and the copies into it.

    Args:
        random: Chooses the blocks that are compared; never a generator that training uses.

    Attributes:
        restless: Names of objects that are copied at once from now on, because something else than a step changed them.
        stepped: Identities of the optimizers that have made a step since the set was last emptied.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._pid = os.getpid()
        self._layout: Layout | None = None
        self._basis: _Basis | None = None
        self._watched_addresses = np.empty(0, np.uint64)
        self._waits: list[bool] = []
        self._arena: Arena | None = None
        self._scratch: Arena | None = None
        self._num_arenas = 0
        self._worker = Worker("overnight-staging")
        self._crew = Crew(Cores())
        self._copied = threading.Event()
        self._copied.set()
        self._watched: tuple[Probe, Versions, list[str], object] | None = None
        self._devices = DeviceCopies(random)
        self._graphed: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._hook: Any = None
        self.restless: set[str] = set()
        self.stepped: set[int] = set()

    @property
    def replayed(self) -> set[int]:
        """Identities of the optimizers whose step is in a CUDA graph: when they make one is not seen."""
        return {id(optimizer) for optimizer in self._graphed}

    @property
    def num_bytes(self) -> int:
        """Staging memory, bytes."""
        return sum(arena.size for arena in (self._arena, self._scratch) if arena is not None)

    def watch(self) -> None:
        """Begins to wait in front of optimizer steps. To be called once an optimizer is tracked, and before a save."""
        if self._hook is None:
            # a compiled step breaks its graph here instead of tracing a wait
            hook: Any = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._hook = register_optimizer_step_pre_hook(hook)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:  # a forked worker of the script has nothing of ours to wait for
            return
        self.stepped.add(id(optimizer))
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._graphed.add(optimizer)  # a replay calls no hook
            self._devices.before_capture()
        self.join()

    def prepare(self, encoded: Encoded, objects: Collection[Any]) -> None:
        """Takes the memory for such a state in the background, so that the first save need not.

        Raises:
            SaveFailedError: There is none. Memory that runs out later is an error of the save.
        """
        _, arena = self._place(encoded, objects, encoded.addresses)

        def touch() -> None:
            with suppress(SaveFailedError):
                arena.touch()

        self._worker.do(touch)

    def stage(self, encoded: Encoded, objects: Collection[Any], then: Callable[[Staged], None]) -> None:
        """Stages a state; returns as soon as training may go on.

        Args:
            encoded: The state of this moment, by reference.
            objects: Everything tracked; optimizers and modules are looked at.
            then: Called in the background once the state is in the arena or has turned out to be none.

        Raises:
            SaveFailedError: No memory for it. Nothing will be called.
        """
        self.join()
        tensors, all_addresses = encoded.tensors, encoded.addresses
        layout, arena = self._place(encoded, objects, all_addresses)
        later = layout.pick(tensors, Way.LATER)
        addresses = all_addresses[layout.sources[Way.LATER]]
        memory = [tensor.untyped_storage() for tensor in later]  # alive even if the tensors are given another
        versions = Versions(later)
        try:
            self._copy_now(layout, arena, tensors, all_addresses)
            probe = self._look(layout, addresses)
        except OSError as error:
            raise no_memory(layout.size, error) from error
        watched = [layout.names[index] for index in layout.members(Way.LATER)]
        self._watched = (probe, versions, watched, memory) if probe is not None else None
        self._copied.clear()
        staged = Staged(arena, layout.pieces)

        def copy() -> None:
            try:
                self._crew.copy(layout.groups[Way.LATER], arena, addresses)
                wrong = {*freed(memory, addresses.tolist(), layout.groups[Way.LATER].lengths), *versions.moved()}
                if probe is not None:
                    wrong.update(probe.wrong_copies(arena), probe.changed_source())
                self._blame(staged, {watched[index] for index in wrong})
            except Exception as error:  # whatever it is, the loop must hear of it, and must not wait for ever
                staged.error = error
            finally:
                self._copied.set()
            self._finish_devices(staged, layout)
            then(staged)

        self._worker.do(copy)

    def join(self) -> None:
        """Waits until what was staged last may change."""
        self._copied.wait()
        self._devices.before_step()
        if self._watched is not None:
            (probe, versions, names, _), self._watched = self._watched, None
            with suppress(OSError):  # a change now is too late to spoil the copy, but may come earlier next time
                self.restless.update(names[index] for index in (*probe.changed_source(), *versions.moved()))

    def close(self) -> None:
        """Ends the copies and gives the memory back. Safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._copied.wait()
        self._worker.close()
        self._crew.close()
        self._drop_memory()
        self._layout = None

    # -- where everything goes ------------------------------------------------------------------------------------

    def _place(self, encoded: Encoded, objects: Collection[Any], addresses: NDArray[np.uint64]) -> tuple[Layout, Arena]:
        optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer) and one not in self._graphed]
        basis = _Basis.of(encoded, optimizers, self.restless)
        if self._layout is None or not self._holds(self._layout, basis, addresses):
            owned = owned_memory(optimizers)
            ways = choose_ways(encoded, owned, self.restless)
            signature = signature_of(encoded, ways)
            if self._layout is None or self._layout.signature != signature:
                self._layout = lay_out(encoded, ways, signature, frozen_memory(objects))
            self._basis = basis
            self._watched_addresses = addresses[self._layout.watched]
            on_device = self._layout.pick(encoded.tensors, Way.DEVICE)
            self._waits = [owned.get(tensor.data_ptr()) == tensor.nbytes for tensor in on_device]
        return self._layout, self._arena_for(self._layout)

    def _holds(self, layout: Layout, basis: "_Basis", addresses: NDArray[np.uint64]) -> bool:
        """Whether the ways that were chosen last are still right."""
        return (
            basis.form is not None
            and basis == self._basis
            and np.array_equal(addresses[layout.watched], self._watched_addresses)
        )

    def _arena_for(self, layout: Layout) -> Arena:
        if self._arena is None or not layout.size <= self._arena.size <= max(2 * layout.size, 1 << 20):
            self._drop_memory()
            self._num_arenas += 1
            self._arena = Arena(int(layout.size * SPARE), self._num_arenas)
            if len(layout.groups[Way.DEVICE]):
                self._arena.pin()
        return self._arena

    def _drop_memory(self) -> None:
        for arena in (self._arena, self._scratch):
            if arena is not None:
                arena.close()
        self._arena = self._scratch = None

    # -- copying ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _copy_now(
        self, layout: Layout, arena: Arena, tensors: Sequence[torch.Tensor], addresses: NDArray[np.uint64]
    ) -> None:
        layout.groups[Way.NOW].write(arena.fileno(), addresses[layout.sources[Way.NOW]])
        for index, tensor in zip(layout.members(Way.STRIDED), layout.pick(tensors, Way.STRIDED), strict=True):
            arena.view(layout.pieces[index].offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        on_device = zip(layout.members(Way.DEVICE), layout.pick(tensors, Way.DEVICE), self._waits, strict=True)
        copies = [
            DeviceCopy(
                index, layout.pieces[index].offset, tensor.detach(), waits and layout.names[index] not in self.restless
            )
            for index, tensor, waits in on_device
        ]
        self._devices.begin(arena, copies)

    def _look(self, layout: Layout, addresses: NDArray[np.uint64]) -> Probe | None:
        group = layout.groups[Way.LATER]
        if not len(group):
            return None
        needed = scratch_bytes(group)
        if self._scratch is None or self._scratch.size < needed:
            self._scratch = Arena(needed, 0)
        return Probe(self._random, self._scratch, group, addresses)

    def _finish_devices(self, staged: Staged, layout: Layout) -> None:
        try:
            self._blame(staged, {layout.names[index] for index in self._devices.finish(staged.arena)})
        except Exception as error:  # the loop must hear of it, as of any other
            staged.error = error

    def _blame(self, staged: Staged, names: set[str]) -> None:
        self.restless |= names
        staged.changed += sorted(names)

"""Stages the state of a boundary: at once what anything may change, in overlap what only an optimizer's step changes.

Whoever stages must know that nobody reads the arena. From then on the stager keeps the state of that moment intact: a
hook in front of every optimizer's step, in whichever thread and of whichever kind (fused, in backward, a subclass with
a step of its own), waits until the copy is complete.
"""

import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.staging.arena import Arena, no_memory
from overnight.trainer.checkpoint.staging.device import DeviceCopies, DeviceCopy
from overnight.trainer.checkpoint.staging.layout import Layout, Way, choose_ways, lay_out, signature_of
from overnight.trainer.checkpoint.staging.ownership import Memory, freed, frozen_memory, owned_memory
from overnight.trainer.checkpoint.staging.probe import Probe, scratch_bytes
from overnight.trainer.checkpoint.staging.versions import Versions
from overnight.trainer.checkpoint.staging.worker import Worker
from overnight.trainer.checkpoint.state import Encoded, Leaf
from overnight.trainer.checkpoint.writing.order import Piece

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
    pieces: tuple[Piece, ...]
    changed: list[str] = field(default_factory=list)
    error: Exception | None = None

    @property
    def good(self) -> bool:
        """Whether the arena holds the state of the boundary."""
        return not self.changed and self.error is None


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
        self._arena: Arena | None = None
        self._scratch: Arena | None = None
        self._num_arenas = 0
        self._worker = Worker("overnight-staging")
        self._copied = threading.Event()
        self._copied.set()
        self._watched: tuple[Probe, Versions, list[str], object] | None = None
        self._devices = DeviceCopies(random)
        self._graphed: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._hook: Any = None
        self.restless: set[str] = set()
        self.stepped: set[int] = set()

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
        self.join()

    def prepare(self, encoded: Encoded, objects: Collection[Any]) -> None:
        """Takes the memory for such a state in the background, so that the first save need not.

        Raises:
            SaveFailedError: There is none. Memory that runs out later is an error of the save.
        """
        _, arena = self._place(encoded, objects, self._owned(objects))

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
        leaves = list(encoded.leaves.values())
        owned = self._owned(objects)
        layout, arena = self._place(encoded, objects, owned)
        later = layout.pick(leaves, Way.LATER)
        addresses = [leaf.tensor.data_ptr() for leaf in later]
        memory = [leaf.tensor.untyped_storage() for leaf in later]  # alive even if the tensors are given another
        versions = Versions([leaf.tensor for leaf in later])
        try:
            self._copy_now(layout, arena, leaves, owned)
            probe = self._look(layout, addresses)
        except OSError as error:
            raise no_memory(layout.size, error) from error
        watched = [layout.names[index] for index in layout.members(Way.LATER)]
        self._watched = (probe, versions, watched, memory) if probe is not None else None
        self._copied.clear()
        staged = Staged(arena, layout.pieces)

        def copy() -> None:
            try:
                layout.groups[Way.LATER].write(arena.fileno(), addresses)
                wrong = {*freed(memory, addresses, layout.groups[Way.LATER].lengths), *versions.moved()}
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
        self._drop_memory()
        self._layout = None

    # -- where everything goes ------------------------------------------------------------------------------------

    def _place(self, encoded: Encoded, objects: Collection[Any], owned: Memory) -> tuple[Layout, Arena]:
        ways = choose_ways(encoded, owned, self.restless)
        signature = signature_of(encoded, ways)
        if self._layout is None or self._layout.signature != signature:
            self._layout = lay_out(encoded, ways, signature, frozen_memory(objects))
        return self._layout, self._arena_for(self._layout)

    def _owned(self, objects: Collection[Any]) -> Memory:
        return owned_memory(
            one for one in objects if isinstance(one, torch.optim.Optimizer) and one not in self._graphed
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

    def _copy_now(self, layout: Layout, arena: Arena, leaves: list[Leaf], owned: Memory) -> None:
        now = layout.pick(leaves, Way.NOW)
        layout.groups[Way.NOW].write(arena.fileno(), [leaf.tensor.data_ptr() for leaf in now])
        for index, leaf in zip(layout.members(Way.STRIDED), layout.pick(leaves, Way.STRIDED), strict=True):
            view = arena.view(layout.pieces[index].offset, leaf.tensor.dtype, tuple(leaf.tensor.shape))
            view.copy_(leaf.tensor)
        copies = []
        for index in layout.members(Way.DEVICE):
            tensor = leaves[layout.order[index]].tensor
            is_owned = owned.get(tensor.data_ptr()) == tensor.nbytes
            waits = is_owned and layout.names[index] not in self.restless
            copies.append(DeviceCopy(index, layout.pieces[index].offset, tensor, waits))
        self._devices.begin(arena, copies)

    def _look(self, layout: Layout, addresses: list[int]) -> Probe | None:
        group = layout.groups[Way.LATER]
        if not addresses:
            return None
        needed = scratch_bytes(group)
        if self._scratch is None or self._scratch.size < needed:
            self._scratch = Arena(needed, 0)
        return Probe(self._random, self._scratch, group, addresses)

    def _finish_devices(self, staged: Staged, layout: Layout) -> None:
        try:
            self._blame(staged, {layout.names[index] for index in self._devices.finish(staged.arena)})
        except RuntimeError as error:
            staged.error = error

    def _blame(self, staged: Staged, names: set[str]) -> None:
        self.restless |= names
        staged.changed += sorted(names)

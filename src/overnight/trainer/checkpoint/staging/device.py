"""Copies from CUDA devices: made by the device, in the order of its streams, so that nobody waits on the host.

What only an optimizer changes is copied on a stream of its own. That stream waits for the current one, which computed
the state; and before a step the current one waits for the copies (an event, not the host). Everything else is copied
on the current stream, in front of whatever changes it next. See "CUDA semantics" in torch's documentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.probe import BLOCK_BYTES
from overnight.trainer.checkpoint.staging.versions import LastLook, Versions

MAX_BLOCKS = 128
"""Each costs the host some microseconds, unlike those of CPU tensors."""


@dataclass(frozen=True)
class DeviceCopy:
    """One tensor on its way.

    Attributes:
        index: Of the piece.
        offset: Of its first byte in the arena.
        source: On a device.
        later: Whether only an optimizer's step changes it.
    """

    index: int
    offset: int
    source: torch.Tensor
    later: bool


class DeviceCopies:
    """The copies of one save after the other.

    Args:
        random: Chooses the blocks that are compared; never a generator that training uses.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._streams: dict[torch.device, Any] = {}
        self._events: list[Any] = []
        self._captured = False
        self._probes: list[DeviceProbe] = []
        self._later: list[DeviceCopy] = []
        self._look = LastLook(Versions([]))

    def begin(self, arena: Arena, copies: Sequence[DeviceCopy]) -> None:
        """Queues copies on their devices. The arena should be pinned: else the host waits for each."""
        self._events, self._probes, self._captured = [], [], False
        self._later = [copy for copy in copies if copy.later]
        self._look = LastLook(Versions([copy.source for copy in self._later]))
        for device in {copy.source.device for copy in copies}:
            here = [copy for copy in copies if copy.source.device == device]
            later = [copy for copy in here if copy.later]
            current = torch.cuda.current_stream(device)
            side = self._streams.get(device)
            if side is None:
                side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _copy(arena, [copy for copy in here if not copy.later])
            probe = DeviceProbe(self._random, later)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                _copy(arena, later)
                for copy in later:
                    copy.source.record_stream(side)
                probe.look_again()
                self._events.append(side.record_event())
            self._probes.append(probe)

    def before_capture(self) -> None:
        """A step is captured, not made: a graph can wait for nothing outside of it, and its replays ask nobody.

        What is not in the arena yet may be changed by a replay, so the save under way does not count.
        """
        events, self._events = self._events, []
        self._captured |= bool(events)

    def before_step(self) -> None:
        """Makes the current streams wait for the copies; the host does not."""
        self._look.take()
        events, self._events = self._events, []
        for event in events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def finish(self, arena: Arena) -> list[int]:
        """Waits until everything is in the arena.

        Returns:
            Indices of the pieces that are not, there or by then at their source, what they were at the boundary.
        """
        for side in self._streams.values():
            side.synchronize()
        if self._captured:
            return [copy.index for copy in self._later]
        moved = [self._later[index].index for index in self._look.take()]  # until the copies are done it may change
        return [*moved, *(index for probe in self._probes for index in probe.changed(arena))]


def _copy(arena: Arena, copies: Sequence[DeviceCopy]) -> None:
    if copies:
        sources = [copy.source for copy in copies]
        targets = [arena.view(copy.offset, copy.source.dtype, tuple(copy.source.shape)) for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _has_blocks(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes, in their order, are what a copy of it holds."""
    as_it_is = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return as_it_is and tensor.nbytes >= BLOCK_BYTES


class DeviceProbe:
    """As :class:`overnight.trainer.checkpoint.staging.probe.Probe`, for some of the contiguous tensors of a device.

    Args:
        random: For the choice; never a generator that training uses.
        copies: Of which some are watched.
    """

    def __init__(self, random: np.random.Generator, copies: Sequence[DeviceCopy]) -> None:
        able = [copy for copy in copies if copy.later and _has_blocks(copy.source)]
        chosen = random.permutation(len(able))[:MAX_BLOCKS]
        self._copies = [able[index] for index in chosen]
        self._within = [int(random.integers(0, copy.source.nbytes - BLOCK_BYTES + 1)) for copy in self._copies]
        self._before = self._take()
        self._after: list[torch.Tensor] = []

    def _take(self) -> list[torch.Tensor]:
        blocks = []
        for copy, within in zip(self._copies, self._within, strict=True):
            flat = copy.source.view(-1).view(torch.uint8)
            blocks.append(flat[within : within + BLOCK_BYTES].clone())
        return blocks

    def look_again(self) -> None:
        """Looks at the sources again; on a stream, behind the copies and in front of the step."""
        self._after = self._take()

    def changed(self, arena: Arena) -> list[int]:
        """Which pieces are, in the arena or by now at their source, not what they were at the boundary."""
        changed = []
        for copy, within, before, after in zip(self._copies, self._within, self._before, self._after, strict=True):
            start = copy.offset + within
            staged = torch.from_numpy(arena.array()[start : start + BLOCK_BYTES].copy())
            was = before.cpu()
            if not torch.equal(was, staged) or not torch.equal(was, after.cpu()):
                changed.append(copy.index)
        return changed

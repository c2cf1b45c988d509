"""Copies by a device: in which order they are queued, who waits for whom, and what of a save is not believed.

There is no device here. Streams are queues that run when somebody waits for them, so that what nobody waits for has
not happened; tensors lie in the memory of the host. That a real device does the same is shown by tests/gpu.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overnight.trainer.checkpoint.saver import Saver
from overnight.trainer.checkpoint.staging import arena as arena_module
from overnight.trainer.checkpoint.staging import stager as stager_module
from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.device import DeviceCopies, DeviceCopy, DeviceProbe
from overnight.trainer.checkpoint.staging.layout import Way
from overnight.trainer.checkpoint.staging.probe import BLOCK_BYTES
from overnight.trainer.checkpoint.staging.stager import Staged, Stager
from overnight.trainer.checkpoint.state import encode

DEADLINE_SECONDS = 20.0
PINNED, REFUSED = 0, 2


class Event:
    def __init__(self, stream: "Stream", position: int) -> None:
        self.stream, self.position = stream, position
        self.device = stream.device


class Stream:
    """A queue of what is to be done."""

    def __init__(self, gpu: "Gpu", name: str, device: Any) -> None:
        self.gpu, self.name, self.device = gpu, name, device
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def put(self, what: str, action: Callable[[], None]) -> None:
        self.gpu.log.append(f"{self.name}: {what}")
        self._queue.append(action)

    def run(self, until: int | None = None) -> None:
        while self._done < (len(self._queue) if until is None else until):
            self._done += 1
            self._queue[self._done - 1]()

    def record_event(self) -> Event:
        self.gpu.log.append(f"{self.name}: record")
        return Event(self, len(self._queue))

    def wait_event(self, event: Event) -> None:
        assert not self.gpu.capturing, "a graph cannot wait for what is not in it"
        self.put(f"wait for {event.stream.name}", lambda: event.stream.run(event.position))

    def wait_stream(self, other: "Stream") -> None:
        position = len(other._queue)
        self.put(f"wait for {other.name}", lambda: other.run(position))

    def synchronize(self) -> None:
        self.gpu.meanwhile()
        self.run()


class Gpu:
    """Stands for ``torch.cuda`` and for what tensors of a device do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.registered: dict[int, int] = {}
        self.answer = PINNED
        self.training = Stream(self, "training", torch.device("cpu"))
        self._active = threading.local()
        self._copy = torch._foreach_copy_
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: self.training)
        monkeypatch.setattr(cuda, "Stream", lambda device: Stream(self, "side", device))
        monkeypatch.setattr(cuda, "stream", self._on)
        monkeypatch.setattr(cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "_foreach_copy_", self._queue_copies)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._note("keep", stream))
        monkeypatch.setattr(DeviceProbe, "look_again", self._note_look(DeviceProbe.look_again))
        monkeypatch.setattr(arena_module, "_forget_failure", lambda: self.log.append("forget"))

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._active.stream = stream
        yield
        del self._active.stream

    def _note(self, what: str, stream: Stream) -> None:
        self.log.append(f"{stream.name}: {what}")

    def _note_look(self, look_again: Callable[[DeviceProbe], None]) -> Callable[[DeviceProbe], None]:
        def look(probe: DeviceProbe) -> None:
            self._note("look", getattr(self._active, "stream", self.training))
            look_again(probe)

        return look

    def _queue_copies(self, targets: Any, sources: Any, non_blocking: bool) -> None:
        assert non_blocking
        stream = getattr(self._active, "stream", self.training)
        stream.put(f"copy {len(sources)}", lambda: self._copy(targets, sources))

    def update(self, tensor: torch.Tensor) -> None:
        """What a step does: moves the counter at once, changes the memory once it is its turn."""
        values = tensor.detach().numpy()

        def add() -> None:
            values[...] += 1

        self.training.put("update", add)
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))

    # as torch.cuda.cudart()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered, "CUDA refuses a second time"
        if self.answer == PINNED:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 16, 1)
    yield arena
    arena.close()


def copies_of(*tensors: tuple[torch.Tensor, bool]) -> list[DeviceCopy]:
    return [DeviceCopy(7 + i, 4096 * i, tensor.detach(), later) for i, (tensor, later) in enumerate(tensors)]


def there(arena: Arena, copy: DeviceCopy) -> torch.Tensor:
    return arena.view(copy.offset, copy.source.dtype, tuple(copy.source.shape)).clone()


# -- order -----------------------------------------------------------------------------------------------------


def test_the_order_of_a_save_and_a_step(gpu: Gpu, arena: Arena) -> None:
    weight, average = torch.rand(500), torch.rand(40)
    before = weight.clone(), average.clone()
    copies = copies_of((weight, True), (average, False))
    devices = DeviceCopies(np.random.default_rng(0))
    devices.begin(arena, copies)
    gpu.update(average)  # what is copied at once may change at once
    devices.before_step()
    gpu.update(weight)
    assert gpu.log == [
        "training: copy 1", "side: wait for training", "side: copy 1", "side: keep", "side: look", "side: record",
        "training: update", "training: wait for side", "training: update",
    ]  # fmt: skip
    gpu.training.run()
    assert torch.equal(weight, before[0] + 1) and torch.equal(average, before[1] + 1)
    assert devices.finish(arena) == []
    assert torch.equal(there(arena, copies[0]), before[0]) and torch.equal(there(arena, copies[1]), before[1])


def test_finish_waits_for_what_is_copied_at_once_too(gpu: Gpu, arena: Arena) -> None:
    average = torch.rand(40)
    copies = copies_of((average, False))
    devices = DeviceCopies(np.random.default_rng(0))
    devices.begin(arena, copies)
    assert devices.finish(arena) == []
    assert torch.equal(there(arena, copies[0]), average)


def test_every_save_is_waited_for_once_and_on_the_same_stream(gpu: Gpu, arena: Arena) -> None:
    weight = torch.rand(500)
    devices = DeviceCopies(np.random.default_rng(0))
    for number in range(3):
        devices.begin(arena, copies_of((weight, True)))
        devices.before_step()
        devices.before_step()
        gpu.update(weight)
        assert gpu.log.count("training: wait for side") == number + 1
        assert devices.finish(arena) == []
        gpu.training.run()
    assert len(devices._streams) == 1


# -- what is not believed --------------------------------------------------------------------------------------


def test_a_change_outside_a_step_before_the_copy_is_named(gpu: Gpu, arena: Arena) -> None:
    """A tensor too small for a block: only its version counter tells."""
    weight, other = torch.rand(4), torch.rand(4)
    devices = DeviceCopies(np.random.default_rng(0))
    devices.begin(arena, copies_of((weight, True), (other, True)))

    def meanwhile() -> None:  # the host waits for the device, which has not come to the copy
        other.add_(1)

    gpu.meanwhile = meanwhile
    assert devices.finish(arena) == [8]


def test_a_step_behind_the_copies_is_no_such_change(gpu: Gpu, arena: Arena) -> None:
    weight = torch.rand(4)
    devices = DeviceCopies(np.random.default_rng(0))
    devices.begin(arena, copies_of((weight, True)))

    def step() -> None:
        devices.before_step()
        gpu.update(weight)

    gpu.meanwhile = step
    assert devices.finish(arena) == []


@pytest.mark.parametrize("where", ["source before the copy", "source behind the copy", "arena"])
def test_bytes_that_changed_unseen_are_named(gpu: Gpu, arena: Arena, where: str) -> None:
    """As by a write through ``.data``, which moves no counter; here as long as a block, so that it is one."""
    weight, other = torch.zeros(BLOCK_BYTES, dtype=torch.uint8), torch.rand(500)
    copies = copies_of((other, True), (weight, True))
    probe = DeviceProbe(np.random.default_rng(0), copies)
    if where == "source before the copy":
        weight[BLOCK_BYTES // 2] = 1
    for copy in copies:
        arena.view(copy.offset, copy.source.dtype, tuple(copy.source.shape)).copy_(copy.source)
    if where == "source behind the copy":
        weight[BLOCK_BYTES // 2] = 1
    if where == "arena":
        arena.array()[copies[1].offset + 3] = 9
    probe.look_again()
    assert probe.changed(arena) == [8]


def test_only_whole_blocks_of_what_a_step_changes_are_watched(gpu: Gpu, arena: Arena) -> None:
    complex_ = torch.rand(40, dtype=torch.complex64)
    able = torch.rand(40)
    copies = copies_of(
        (able, True), (torch.rand(40), False), (torch.rand(40, 40).t(), True), (torch.rand(3), True),
        (complex_.conj(), True), (complex_.conj().imag, True), (able.new_empty(0), True),
    )  # fmt: skip
    probe = DeviceProbe(np.random.default_rng(0), copies)
    assert [copy.index for copy in probe._copies] == [7]


# -- a stager whose tensors are on a device --------------------------------------------------------------------


class Script:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.update()

    def update(self) -> None:
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        encoded = encode({name: obj.state_dict() for name, obj in self.objects.items()})
        return {key: leaf.tensor.clone() for key, leaf in encoded.leaves.items()}


@pytest.fixture
def stager(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    monkeypatch.setattr(
        stager_module, "choose_ways", lambda encoded, owned, restless: [Way.DEVICE] * len(encoded.leaves)
    )
    stager = Stager(np.random.default_rng(0))
    stager.watch()
    yield stager
    stager.close()


def begin(stager: Stager, script: Script) -> Callable[[], Staged]:
    said: list[Staged] = []
    ready = threading.Event()

    def then(staged: Staged) -> None:
        said.append(staged)
        ready.set()

    encoded = encode({name: obj.state_dict() for name, obj in script.objects.items()})
    stager.stage(encoded, list(script.objects.values()), then)

    def get() -> Staged:
        assert ready.wait(DEADLINE_SECONDS)
        return said[0]

    return get


def require_holds(staged: Staged, values: dict[str, torch.Tensor]) -> None:
    assert staged.good and {piece.key for piece in staged.pieces} == set(values)
    for piece in staged.pieces:
        found = staged.arena.view(piece.offset, getattr(torch, piece.dtype), piece.shape)
        assert torch.equal(found, values[piece.key]), piece.key


@contextmanager
def stopped(gpu: Gpu) -> Iterator[None]:
    """The host does not get to wait for the device meanwhile."""
    gate = threading.Event()

    def meanwhile() -> None:
        gate.wait(DEADLINE_SECONDS)

    gpu.meanwhile = meanwhile
    try:
        yield
    finally:
        gate.set()


def test_a_save_and_the_next_step(gpu: Gpu, stager: Stager) -> None:
    script = Script()
    values = script.values()
    gpu.log.clear()
    with stopped(gpu):
        get = begin(stager, script)
        gpu.training.run()  # the device has copied what the forward changes, and nothing else
        script.optimizer.register_step_pre_hook(lambda *_: gpu.training.run())  # the device gets to the step
        script.update()
    require_holds(get(), values)
    # running mean, variance and count at once; four parameters and their momentum in overlap
    assert [line for line in gpu.log if "keep" not in line] == [
        "training: copy 3", "side: wait for training", "side: copy 8", "side: look", "side: record",
        "training: wait for side",
    ]  # fmt: skip
    assert not stager.restless


def test_the_memory_is_pinned_once_and_let_go(gpu: Gpu, stager: Stager) -> None:
    script = Script()
    for _ in range(3):
        assert begin(stager, script)().good
    assert stager._arena is not None and stager._arena.pin()
    assert list(gpu.registered.values()) == [stager._arena.size]
    assert list(gpu.registered) == [stager._arena.array().ctypes.data]
    stager.close()
    assert not gpu.registered


def test_memory_that_cannot_be_pinned_is_used_all_the_same(gpu: Gpu, stager: Stager) -> None:
    gpu.answer = REFUSED
    script = Script()
    require_holds(begin(stager, script)(), script.values())
    assert stager._arena is not None and not stager._arena.pin()
    assert gpu.log.count("forget") == 2, "the next kernel of training does not hear of it"
    stager.close()


def test_an_error_of_the_device_is_heard(gpu: Gpu, stager: Stager) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    gpu.meanwhile = fail
    staged = begin(stager, Script())()
    assert not staged.good and "illegal memory access" in str(staged.error)
    gpu.meanwhile = lambda: None


# -- graphs: a step that is captured, and replays that call no hook --------------------------------------------


def capture(gpu: Gpu, script: Script) -> None:
    script.optimizer.zero_grad()
    gpu.capturing = True
    script.optimizer.step()  # changes nothing
    gpu.capturing = False


def test_a_graphed_step_is_staged_at_the_boundary(gpu: Gpu, stager: Stager) -> None:
    script = Script()
    capture(gpu, script)
    gpu.log.clear()
    values = script.values()
    with stopped(gpu):
        get = begin(stager, script)
        gpu.training.run()  # nothing of the side stream is done, nor waited for
        for param in script.model.parameters():
            param.detach().numpy()[...] += 1  # a replay
    require_holds(get(), values)
    assert gpu.log == ["training: copy 11", "side: wait for training", "side: look", "side: record"]


def test_a_capture_waits_for_nothing_and_a_save_under_way_does_not_count(gpu: Gpu, stager: Stager) -> None:
    script = Script()
    with stopped(gpu):
        get = begin(stager, script)
        capture(gpu, script)
        capture(gpu, script)  # another step in the same graph
    staged = get()
    assert not staged.good and staged.changed == ["model", "optimizer"]
    require_holds(begin(stager, script)(), script.values())


def test_gradients_of_a_graph_are_no_accumulation(gpu: Gpu, stager: Stager) -> None:
    script = Script()
    saver = Saver(None, stager, None)  # type: ignore[arg-type]  # no pipeline: nothing is saved
    for name, obj in script.objects.items():
        saver.track(name, obj)
    saver.next_update()
    assert list(saver.pending_gradients()) == ["optimizer"], "no step since the last boundary"
    capture(gpu, script)
    script.update()
    saver.next_update()
    assert saver.pending_gradients() == {}


def test_only_the_graphed_optimizer_is_staged_at_once(gpu: Gpu, stager: Stager) -> None:
    one, two = Script(), Script()
    capture(gpu, one)
    assert stager.replayed == {id(one.optimizer)}
    gpu.log.clear()
    both = Script()
    both.objects = {"model": one.model, "optimizer": one.optimizer, "critic": two.model, "second": two.optimizer}
    require_holds(begin(stager, both)(), both.values())
    assert [line for line in gpu.log if "copy" in line] == ["training: copy 14", "side: copy 8"]

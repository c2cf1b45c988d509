"""Random state and settings of CUDA devices, with generators that only stand for theirs.

Each device's generator is one of the CPU here. That real ones go on alike is shown by tests/gpu.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overnight.core.errors import CheckpointError
from overnight.trainer import rng
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.envelope import differences, envelope
from overnight.trainer.environment import Environment
from overnight.trainer.start import pick_device

CUDA = torch.device("cuda", 0)


class Devices:
    """So many, each with its generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
        self.generators = [torch.Generator().manual_seed(100 + number) for number in range(num_devices)]
        self.used = True
        self.current: torch.device | None = None
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "is_initialized", lambda: self.used)
        monkeypatch.setattr(cuda, "device_count", lambda: len(self.generators))
        monkeypatch.setattr(cuda, "get_rng_state_all", lambda: [one.get_state() for one in self.generators])
        monkeypatch.setattr(cuda, "set_rng_state", lambda state, device: self.generators[device].set_state(state))
        monkeypatch.setattr(cuda, "set_device", lambda device: setattr(self, "current", device))
        monkeypatch.setattr(cuda, "get_device_name", lambda device: f"NVIDIA {device.index}")

    def draw(self) -> list[float]:
        return [torch.rand((), generator=one).item() for one in self.generators]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch, 3)


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    with rng.isolated():
        yield


def test_every_device_goes_on_where_it_was(devices: Devices) -> None:
    devices.draw()
    state = rng.capture()
    expected = devices.draw()
    assert len(set(expected)) == 3
    devices.draw()
    rng.restore(state)
    assert devices.draw() == expected


def test_the_states_are_tensors_of_a_checkpoint(devices: Devices) -> None:
    keys = [key for key in encode({"random": rng.capture()}).leaves if ".cuda." in key]
    assert keys == ["random.cuda.0", "random.cuda.1", "random.cuda.2"]


def test_a_process_that_uses_no_device_has_no_states_of_them(devices: Devices) -> None:
    devices.used = False
    state = rng.capture()
    assert state["cuda"] == []
    expected = devices.draw()
    devices.generators = [torch.Generator().manual_seed(100 + number) for number in range(3)]
    rng.restore(state)
    assert devices.draw() == expected, "nor are they touched"


def test_fewer_devices_than_states_change_nothing(devices: Devices) -> None:
    state = rng.capture()
    lost = devices.generators.pop()
    expected, first = torch.rand(()).item(), devices.draw()
    devices.generators = [torch.Generator().manual_seed(100 + number) for number in range(2)]
    rng.restore({**state, "cuda": []})
    with pytest.raises(CheckpointError, match=r"3 CUDA device\(s\), this process sees 2"):
        rng.restore(state)
    assert (torch.rand(()).item(), devices.draw()) == (expected, first)
    devices.generators.append(lost)
    rng.restore(state)


def test_more_devices_than_states_leave_the_others_alone(devices: Devices) -> None:
    state = rng.capture()
    first, second, third = devices.draw()
    rng.restore({**state, "cuda": state["cuda"][:2]})
    assert devices.draw()[:2] == [first, second]
    assert devices.draw()[2] != third


def test_a_malformed_state_is_loud_and_changes_nothing(devices: Devices) -> None:
    state = rng.capture()
    state["cuda"][1] = "x"
    rng.seed_cpu(4)
    expected = torch.rand(()).item()
    rng.seed_cpu(4)
    with pytest.raises(CheckpointError, match="random state cannot be restored"):
        rng.restore(state)
    assert torch.rand(()).item() == expected


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (2, 2), (4, 1)])
def test_each_rank_has_its_device(devices: Devices, local_rank: int, index: int) -> None:
    device = pick_device(Environment(rank=local_rank, local_rank=local_rank, world_size=5, local_world_size=5))
    assert device == devices.current == torch.device("cuda", index)


# -- what the last bits depend on on a device ------------------------------------------------------------------


CUDNN: Any = torch.backends.cudnn
FLAGS: dict[str, tuple[Any, str, Any]] = {
    "cuDNN": (CUDNN, "enabled", False),
    "cuDNN benchmark": (CUDNN, "benchmark", True),
    "cuDNN deterministic": (CUDNN, "deterministic", True),
    "matmul float32 precision": (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cuDNN float32 precision": (CUDNN.conv, "fp32_precision", "tf32"),
    "reduced precision sums": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_another_at_the_resume_is_named(devices: Devices, name: str) -> None:
    where, attribute, value = FLAGS[name]
    before = getattr(where, attribute)
    saved = envelope(CUDA, 1)
    try:
        setattr(where, attribute, value if value != before else "ieee")
        found = differences(saved, envelope(CUDA, 1))
    finally:
        setattr(where, attribute, before)
    assert len(found) == 1 and found[0].startswith(f"{name} "), found
    assert differences(saved, envelope(CUDA, 1)) == []


def test_tf32_set_the_old_way_is_seen(devices: Devices) -> None:
    saved = envelope(CUDA, 1)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        found = differences(saved, envelope(CUDA, 1))
    finally:
        torch.set_float32_matmul_precision(before)
    assert "matmul float32 precision" in " ".join(found)


@pytest.mark.parametrize("variable", ["CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO"])
def test_a_variable_of_the_libraries(devices: Devices, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    saved = envelope(CUDA, 1)
    monkeypatch.setenv(variable, "1")
    assert differences(saved, envelope(CUDA, 1)) == [f"{variable} 0 -> 1"]


def test_another_device_and_other_libraries(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(cuda: str, cudnn: int, device: int) -> dict[str, Any]:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(CUDNN, "version", lambda: cudnn)
        return envelope(torch.device("cuda", device), 1)

    changed = differences(found("12.8", 91000, 0), found("13.1", 92000, 1))
    assert changed == ["cuda 12.8 -> 13.1", "cudnn 91000 -> 92000", "device name NVIDIA 0 -> NVIDIA 1"]


def test_a_run_on_the_cpu_asks_no_device(devices: Devices) -> None:
    facts = envelope(torch.device("cpu"), 1)
    assert not [name for part in ("versions", "envelope") for name in facts[part] if "cud" in name.lower()]

"""NVIDIA GPUs through NVML, asked from the node daemon only: no CUDA context is ever made here.

Source: NVML API reference (https://docs.nvidia.com/deploy/nvml-api/) and its Python binding, nvidia-ml-py. Each sensor
may be missing on a given board or driver; a missing one is left out of the evidence, it is not a fault.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from overnight.core.errors import SetupError
from overnight.core.models.node import DeviceReport
from overnight.core.paths import Home
from overnight.platform.health.causes import CauseTable, shipped_causes

THERMAL_REASONS = 0x20 | 0x40
"""nvmlClocksEventReasonSwThermalSlowdown | nvmlClocksEventReasonHwThermalSlowdown."""
HARDWARE_SLOWDOWN = 0x08
POWER_BRAKE = 0x80
MAX_EVENTS_PER_PROBE = 256


def open_nvml(indices: tuple[int, ...] | None, home: Home) -> "NvmlPool":
    """The GPUs of this machine, or those of ``indices``.

    Raises:
        SetupError: No driver, no NVML library, no GPU, or an index that does not exist.
    """
    try:
        import pynvml
    except ImportError:
        raise SetupError(
            "the pool nvml needs the Python binding of NVML", hint="Install it: pip install nvidia-ml-py"
        ) from None
    try:
        pynvml.nvmlInit()
        num_gpus = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        raise SetupError(
            f"NVML does not answer: {error}", hint="Check nvidia-smi, or use --pool cpu:N or --pool fake:N."
        ) from None
    chosen = tuple(range(num_gpus)) if indices is None else indices
    if not chosen or chosen[-1] >= num_gpus:
        pynvml.nvmlShutdown()
        raise SetupError(
            f"this machine has {num_gpus} GPUs; there is no GPU {chosen[-1] if chosen else 0}",
            hint="Name existing ones, e.g. nvml:0-1.",
        )
    return NvmlPool(pynvml, chosen, home)


class NvmlPool:
    """GPUs by NVML index. ``CUDA_VISIBLE_DEVICES`` names them by UUID, which holds whatever CUDA's own order is.

    Args:
        nvml: The module ``pynvml``, initialised.
    """

    def __init__(self, nvml: Any, indices: Sequence[int], home: Home, causes: CauseTable | None = None) -> None:
        self._nvml = nvml
        self._indices = tuple(indices)
        self._is_ours = _OwnProcesses(home)
        self._causes = causes or shipped_causes()
        self._known: dict[int, DeviceReport] = {}
        self._xids = _XidEvents(nvml, self._indices)

    def probe(self) -> list[DeviceReport]:
        """Identity, processes, ECC, row remaps, clock reasons and the Xid events since the last probe."""
        xids = self._xids.drain()
        return [self._probe_one(index, xids.get(index, [])) for index in self._indices]

    def _probe_one(self, index: int, xids: list[int]) -> DeviceReport:
        causes = [f"xid_{number}" for number in xids]
        evidence: dict[str, Any] = {"xids": xids} if xids else {}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            identity = self._identity(index, handle)
            foreign = [pid for pid in self._pids(handle) if not self._is_ours(pid)]
            causes += self._memory_causes(handle, evidence) + self._clock_causes(handle, evidence)
        except self._nvml.NVMLError as error:
            lost = getattr(error, "value", None) in (
                self._nvml.NVML_ERROR_GPU_IS_LOST,
                self._nvml.NVML_ERROR_NOT_FOUND,
            )
            causes.insert(0, "gpu_lost" if lost else "probe_failed")
            evidence["error"] = str(error)
            identity, foreign = self._last_identity(index), []
        if foreign:
            evidence["foreign_pids"] = foreign
        fatal, soft = self._causes.split(causes)
        report = identity.model_copy(
            update={"fatal": fatal, "soft": soft, "busy": bool(foreign), "evidence": evidence | {"causes": causes}}
        )
        self._known[index] = report
        return report

    def _identity(self, index: int, handle: Any) -> DeviceReport:
        return DeviceReport(
            index=index,
            kind="gpu",
            type=_short_type(_text(self._nvml.nvmlDeviceGetName(handle))),
            memory_bytes=int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
        )

    def _last_identity(self, index: int) -> DeviceReport:
        return self._known.get(index) or DeviceReport(
            index=index, kind="gpu", type="unknown", memory_bytes=0, uuid=f"gpu-{index}"
        )

    def _pids(self, handle: Any) -> list[int]:
        return [int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]

    def _ask(self, sensor: str, *args: Any) -> Any:
        """The sensor's value, or None where the board or driver has none. A lost GPU still raises."""
        function: Callable[..., Any] | None = getattr(self._nvml, sensor, None)
        if function is None:
            return None
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def _memory_causes(self, handle: Any, evidence: dict[str, Any]) -> list[str]:
        causes = []
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            _, uncorrectable, pending, failed = rows
            evidence["rows_remapped_uncorrectable"] = int(uncorrectable)
            causes += ["row_remap_failed"] * bool(failed) + ["row_remap_pending"] * bool(pending)
        nvml = self._nvml
        uncorrected = self._ask(
            "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if uncorrected:
            evidence["ecc_uncorrected"] = int(uncorrected)
            causes.append("ecc_uncorrectable")
        return causes

    def _clock_causes(self, handle: Any, evidence: dict[str, Any]) -> list[str]:
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        temperature = self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            evidence["celsius"] = int(temperature)
        if not reasons:
            return []
        evidence["clock_reasons"] = int(reasons)
        bits = {"thermal_slowdown": THERMAL_REASONS, "power_brake": POWER_BRAKE, "hardware_slowdown": HARDWARE_SLOWDOWN}
        return [name for name, mask in bits.items() if reasons & mask]

    def visible(self, indices: Sequence[int]) -> dict[str, str]:
        """``CUDA_VISIBLE_DEVICES`` with the UUIDs, in the order of ``indices``."""
        uuids = []
        for index in indices:
            if index not in self._known:
                self._known[index] = self._identity(index, self._nvml.nvmlDeviceGetHandleByIndex(index))
            uuids.append(self._known[index].uuid)
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def is_clean(self, index: int, pids: Collection[int]) -> bool:
        """Whether the driver lists none of the processes on the GPU. A GPU that does not answer is not clean."""
        try:
            held = self._pids(self._nvml.nvmlDeviceGetHandleByIndex(index))
        except self._nvml.NVMLError:
            return False
        wanted = set(pids)
        return not any(pid in wanted or self._is_ours.of_attempt(pid, wanted) for pid in held)

    def describe(self) -> str:
        """E.g. ``8 GPUs (h100)``."""
        types = sorted({report.type for report in self._known.values()})
        return f"{len(self._indices)} GPU{'s' if len(self._indices) != 1 else ''}" + (
            f" ({', '.join(types)})" if types else ""
        )


class _XidEvents:
    """Xid events since the last look. Boards without event support give none."""

    def __init__(self, nvml: Any, indices: Sequence[int]) -> None:
        self._nvml = nvml
        self._by_bus: dict[str, int] = {}
        self._set: Any = None
        with contextlib.suppress(nvml.NVMLError):
            self._set = nvml.nvmlEventSetCreate()
        for index in indices if self._set is not None else ():
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                self._by_bus[_text(nvml.nvmlDeviceGetPciInfo(handle).busId)] = index

    def drain(self) -> dict[int, list[int]]:
        """Xid numbers by device index."""
        found: dict[int, list[int]] = {}
        for _ in range(MAX_EVENTS_PER_PROBE if self._set is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
                bus = _text(self._nvml.nvmlDeviceGetPciInfo(event.device).busId)
            except self._nvml.NVMLError:
                break  # NVML_ERROR_TIMEOUT: nothing left
            if bus in self._by_bus:
                found.setdefault(self._by_bus[bus], []).append(int(event.eventData))
        return found


class _OwnProcesses:
    """Tells our processes from other people's: one of theirs or of their ancestors' start environments names our home.

    A rank forked from the warm process shows that process's start environment, a rank of its own interpreter has the
    supervisor among its ancestors, and orphans are adopted by the supervisor: all of them pass.
    """

    def __init__(self, home: Home) -> None:
        self._mark = f"OVERNIGHT_HOME={home.root}".encode()

    def __call__(self, pid: int) -> bool:
        while pid > 1:
            process = Path("/proc") / str(pid)
            try:
                if self._mark in (process / "environ").read_bytes().split(b"\0"):
                    return True
                pid = _parent(process)
            except OSError:
                return not process.exists()  # gone meanwhile: nobody's
        return False

    def of_attempt(self, pid: int, pids: Collection[int]) -> bool:
        """Whether one of ``pids`` is an ancestor of the process."""
        while pid > 1:
            if pid in pids:
                return True
            try:
                pid = _parent(Path("/proc") / str(pid))
            except OSError:
                return False
        return False


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _short_type(name: str) -> str:
    """What people write in ``type:``: ``NVIDIA H100 80GB HBM3`` -> ``h100``, ``GeForce RTX 4090`` -> ``rtx4090``."""
    words = [word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "tesla", "geforce")]
    if not words:
        return "gpu"
    return "".join(words[:2]) if words[0] in ("rtx", "gtx", "quadro", "titan") else words[0]

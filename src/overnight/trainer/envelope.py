"""The conditions under which a resumed run has the bits of an undisturbed one: recorded at a save, compared at resume.

The same script gives the same bits only with the same versions, thread count, kernels and number of ranks. Nothing here
is enforced: what differs is named in one line, with what is promised all the same.
"""

import functools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overnight.trainer.checkpoint.versions import versions

Facts = dict[str, Any]

WORLD_SIZE = "world size"
_SHOWN = 6
_DENORMAL, _ONE = 1e-310, 1.0
_CUDA_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO")


def envelope(device: torch.device, world_size: int) -> Facts:
    """What the last bits of this run may depend on, besides its script, params and data.

    Asks no GPU anything but the name of the run's own one.

    Args:
        device: Of the run.
        world_size: Number of ranks.

    Returns:
        ``{"versions", "threads", "envelope"}``, JSON-able: versions by name, compute threads of a rank, and everything
        else by name (strings, integers and booleans).
    """
    onednn: Any = torch.backends.mkldnn
    return {
        "versions": _versions(device),
        "threads": torch.get_num_threads(),
        "envelope": {
            WORLD_SIZE: world_size,
            "device": device.type,
            "device name": _device_name(device),
            "processor features": torch.backends.cpu.get_cpu_capability(),
            "hash seed": os.environ.get("PYTHONHASHSEED", "random"),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "oneDNN": bool(onednn.enabled),
            "oneDNN float32 precision": f"{onednn.matmul.fp32_precision}/{onednn.conv.fp32_precision}",
            "denormals flushed": _flushes_denormals(),
            **(_cuda_flags() if device.type == "cuda" else {}),
        },
    }


def _versions(device: torch.device) -> dict[str, str]:
    found = versions()
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    for name in ("torchvision", "triton"):  # only what the script has imported can matter
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            found[name] = str(version)
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _flushes_denormals() -> bool:
    """Whether tiny numbers become 0 (``torch.set_flush_denormal``): a mode of the processor in this thread."""
    return _DENORMAL * _ONE == 0.0


def _cuda_flags() -> Facts:
    """Precisions are asked the new way (``fp32_precision``), which answers however they were set."""
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return {
        "cuDNN": bool(cudnn.enabled),
        "cuDNN benchmark": bool(cudnn.benchmark),
        "cuDNN deterministic": bool(cudnn.deterministic),
        "cuDNN float32 precision": f"{cudnn.conv.fp32_precision}/{cudnn.rnn.fp32_precision}",
        "matmul float32 precision": str(matmul.fp32_precision),
        "reduced precision sums": str(sums),
        **{name: value for name in _CUDA_VARIABLES if (value := os.environ.get(name)) is not None},
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was at the save, as ``name before -> now``.

    The number of ranks is not among it, since that has other consequences; nor are facts that only one side knows.

    Args:
        saved: Facts of the checkpoint, as :func:`envelope` returns them; parts may be missing.
        now: Facts of this run.
    """
    changed = []
    if saved.get("threads", now["threads"]) != now["threads"]:
        changed.append(f"threads {saved['threads']} -> {now['threads']}")
    for part in ("versions", "envelope"):
        before: Mapping[str, Any] = saved.get(part) or {}
        for name, value in now[part].items():
            if name in before and before[name] != value and name != WORLD_SIZE:
                changed.append(f"{name} {before[name]} -> {value}")
    return changed


def warning(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """One line for the person who resumes, None if nothing differs.

    Args:
        saved, now: As with :func:`differences`.
    """
    changed = differences(saved, now)
    if not changed:
        return None
    shown = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
    return f"changed since it was saved: {shown}; samples and their order stay exact, the last bits may differ"

"""The safetensors format: a length, a JSON header, and the bytes of each tensor. Written here since that is all it is.

Described at https://huggingface.co/docs/safetensors; files written here are read by the library of that name.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overnight.core.errors import BadInputError, CorruptCheckpointError
from overnight.trainer.checkpoint.place import sync_directory
from overnight.trainer.checkpoint.reading.memory import Slabs, bytes_of, shaped

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
"""As the library has it: no larger header is read."""


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """Writes tensors to a file, durably, whole or not at all; tied ones are written under each name.

    Returns:
        Bytes of the file.

    Raises:
        BadInputError: A tensor's type is none that the format has.
        OSError: The file system refused.
    """
    flat = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    header = _header(flat, metadata)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in flat.values():
                file.write(bytes_of(tensor))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return size


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise BadInputError(
                f"{key} is {str(tensor.dtype).removeprefix('torch.')}, which safetensors does not have",
                hint="Export to a .pt file instead.",
            )
        end = offset + tensor.numel() * tensor.element_size()
        body[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return header + b" " * (-len(header) % 8)  # so that the tensors are aligned


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, in fresh memory.

    Raises:
        CorruptCheckpointError: It is no safetensors file, or cut off.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors, slabs = {}, Slabs()
            for key, entry in header.items():
                start, end = entry["data_offsets"]
                dtype, shape = TYPES[entry["dtype"]], entry["shape"]
                if end - start != math.prod(shape) * dtype.itemsize or not 0 <= start <= end <= size - length - 8:
                    raise ValueError(f"{key} does not lie in the file")
                memory = slabs.take(end - start)
                file.seek(8 + length + start)
                file.readinto(memory)
                tensors[key] = shaped(memory, dtype, shape)
            return tensors
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is no whole safetensors file: {error}") from None

"""The archive that ``torch.save`` makes of one tensor, without torch.

It is an uncompressed zip file: a pickle that says how to rebuild the tensor, its byte order, the format's version, and
its bytes, which begin at a multiple of 64. Checksums are 0, as ``torch.serialization.set_crc32_options(False)`` writes
them: the manifest's hashes are stronger. What surrounds the bytes depends on type and shape only.
"""

import math
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache

from overnight.trainer.checkpoint.writing.opcodes import (
    BEGIN,
    EMPTY_TUPLE,
    END,
    FALSE,
    called,
    integer,
    named,
    text,
    tuple_of,
)

ALIGNMENT = 64
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Types that have a storage class of their own; all later ones are rebuilt from untyped bytes."""

_ZIP64 = 0xFFFFFFFF
_UTF8 = 0x800
_FIRST_DAY = 0x21  # 1980-01-01, the zip epoch


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What stands before and after the bytes of a tensor, when the archive begins at a multiple of 64."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def wrap(dtype: str, shape: tuple[int, ...], num_bytes: int) -> Wrapping:
    """The archive of a contiguous tensor, without its bytes.

    Args:
        dtype: As torch names it, without ``torch.``.
        shape: Of the tensor.
        num_bytes: Of its data.
    """
    small = {"data.pkl": _rebuild(dtype, shape, num_bytes), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    before, directory = b"", b""
    for name, data in small.items():
        directory += _directory_entry(name, len(data), len(before))
        before += _local_header(name, len(data), b"") + data
    directory += _directory_entry("data/0", num_bytes, len(before))
    before += _data_header(num_bytes, len(before))
    return Wrapping(before, directory + _end(len(small) + 1, len(directory), len(before) + num_bytes))


def _rebuild(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """The pickle of the tensor; its bytes are the persistent object ``0``."""
    num_elements = math.prod(shape)
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    untyped = dtype not in _STORAGES
    storage = named("torch.storage", "UntypedStorage") if untyped else named("torch", _STORAGES[dtype])
    size = integer(num_bytes if untyped else num_elements)
    data = tuple_of(text("storage"), storage, text("0"), text("cpu"), size) + b"Q"
    sizes = tuple_of(*(integer(length) for length in shape))
    steps = tuple_of(*(integer(stride) for stride in reversed(strides)))
    hooks = named("collections", "OrderedDict") + EMPTY_TUPLE + b"R"
    arguments = [data, integer(0), sizes, steps, FALSE, hooks]
    if untyped:
        arguments.append(named("torch", dtype))
    return BEGIN + called(named("torch._utils", f"_rebuild_tensor_v{3 if untyped else 2}"), *arguments) + END


def _local_header(name: str, size: int, extra: bytes) -> bytes:
    path = f"archive/{name}".encode()
    small = min(size, _ZIP64)
    fields = (0x04034B50, 45, _UTF8, 0, 0, _FIRST_DAY, 0, small, small, len(path), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + path + extra


def _data_header(size: int, position: int) -> bytes:
    """Header of the data, filled up so that they begin at a multiple of 64."""
    zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP64 else b""
    bare = position + len(_local_header("data/0", size, zip64)) + 4  # 4: header of the filling itself
    filling = b"Z" * (-bare % ALIGNMENT)
    return _local_header("data/0", size, zip64 + struct.pack("<2sH", b"FB", len(filling)) + filling)


def _directory_entry(name: str, size: int, position: int) -> bytes:
    path = f"archive/{name}".encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP64 else b""
    small = min(size, _ZIP64)
    fields = (0x02014B50, 45, 45, _UTF8, 0, 0, _FIRST_DAY, 0, small, small, len(path), len(extra), 0, 0, 0, 0, position)
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields) + path + extra


def _end(num_files: int, length: int, position: int) -> bytes:
    """The end of the directory, in both sizes of numbers."""
    zip64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, num_files, num_files, length, position)
    locator = struct.pack("<IIQI", 0x07064B50, 0, position + length, 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, num_files, num_files, length, min(position, _ZIP64), 0)
    return zip64 + locator + end

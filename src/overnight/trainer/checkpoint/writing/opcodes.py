"""Pickles assembled by hand: classes and dtypes of torch are named in them without being imported.

Importing torch costs seconds and hundreds of megabytes, and a pickler that sees only stand-ins would be slower than
joining bytes. Every value is a function from Python data to opcodes (protocol 2, see :mod:`pickletools`), so a pickle
of 100,000 tensors is little more than one ``b"".join``.
"""

import struct
from collections.abc import Iterable

BEGIN = b"\x80\x02"
END = b"."
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
EMPTY_TUPLE, EMPTY_DICT, EMPTY_LIST = b")", b"}", b"]"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def named(module: str, name: str) -> bytes:
    """A class, function or constant of a module."""
    return f"c{module}\n{name}\n".encode("ascii")


def remembered(number: int, value: bytes) -> bytes:
    """Evaluates a value, keeps it as memo ``number`` (below 256) and leaves nothing on the stack."""
    return value + b"q" + bytes([number]) + b"0"


def recalled(number: int) -> bytes:
    """The value that was remembered under a number."""
    return b"h" + bytes([number])


def text(value: str) -> bytes:
    """A string."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    """An int of any size."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tuple_of(*values: bytes) -> bytes:
    """A tuple of values."""
    if not values:
        return EMPTY_TUPLE
    if len(values) in _TUPLES:
        return b"".join(values) + _TUPLES[len(values)]
    return b"(" + b"".join(values) + b"t"


def list_of(values: Iterable[bytes]) -> bytes:
    """A list of values."""
    return EMPTY_LIST + b"(" + b"".join(values) + b"e"


def dict_of(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A dict of pairs of values."""
    return EMPTY_DICT + b"(" + b"".join(part for item in items for part in item) + b"u"


def called(function: bytes, *arguments: bytes) -> bytes:
    """What a function returns."""
    return function + tuple_of(*arguments) + b"R"


def built(cls: bytes, state: bytes) -> bytes:
    """An object made without arguments, then given a state."""
    return cls + EMPTY_TUPLE + b"\x81" + state + b"b"

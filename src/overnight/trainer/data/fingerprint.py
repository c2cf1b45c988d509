"""Notices that a data set is not the one that a position was saved in, at the cost of reading three samples.

A position means nothing in other data: after a file was replaced or rows were re-sorted, "continue at sample 12,000"
would silently repeat some samples and skip others. The length catches most changes; the content of the first, the
middle and the last sample catches most of the rest. Samples that differ from one reading to the next (a clock, a
generator of the data set's own) cannot be compared; then only a fingerprint that the user supplies can help.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from overnight.trainer.rng import isolated, seed_cpu

_PROBE_SEED = 0x6F7665726E696768


UNSTABLE = "unstable"
"""The fingerprint of a data set whose samples differ each time they are read."""


def content_hash(dataset: Any) -> str:
    """Hash of the first, middle and last sample, 16 hexadecimal digits, or :data:`UNSTABLE`.

    Augmentation is made repeatable with a fixed seed; the process's generators are left as they were. A sample that
    cannot be read counts by the type of its error: the training loop will meet the error itself. Each sample is read
    twice.

    Args:
        dataset: A map-style data set with a length.
    """
    first = _hash_once(dataset)
    return first if _hash_once(dataset) == first else UNSTABLE


def _hash_once(dataset: Any) -> str:
    digest = xxhash.xxh3_64()
    num_samples = len(dataset)
    with isolated():
        for index in sorted({0, num_samples // 2, num_samples - 1} if num_samples else set()):
            seed_cpu(_PROBE_SEED + index)
            try:
                _feed(digest, dataset[index])
            except Exception as error:
                _label(digest, "error", type(error).__name__)
    return digest.hexdigest()


def _label(digest: xxhash.xxh3_64, kind: str, text: str) -> None:
    digest.update(f"{kind}:{len(text)}:{text};".encode("utf-8", "surrogatepass"))


def _feed(digest: xxhash.xxh3_64, value: Any) -> None:
    match value:
        case torch.Tensor():
            _feed_tensor(digest, value)
        case np.ndarray() | np.generic():
            array = np.ascontiguousarray(value)
            _label(digest, "array", f"{array.dtype}{array.shape}")
            digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
        case bytes() | bytearray() | memoryview():
            _label(digest, "bytes", str(len(value)))
            digest.update(bytes(value))
        case str() | int() | float() | complex() | None:
            _label(digest, type(value).__name__, repr(value))
        case Mapping():
            _label(digest, "mapping", str(len(value)))
            for key, item in value.items():
                _feed(digest, key)
                _feed(digest, item)
        case list() | tuple():
            _label(digest, "sequence", str(len(value)))
            for item in value:
                _feed(digest, item)
        case _:
            _feed_object(digest, value)


def _feed_tensor(digest: xxhash.xxh3_64, value: torch.Tensor) -> None:
    _label(digest, "tensor", f"{value.dtype}{tuple(value.shape)}{value.layout}")
    if value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def _feed_object(digest: xxhash.xxh3_64, value: Any) -> None:
    _label(digest, "object", type(value).__qualname__)
    to_bytes = getattr(value, "tobytes", None)
    if callable(to_bytes):
        digest.update(to_bytes())

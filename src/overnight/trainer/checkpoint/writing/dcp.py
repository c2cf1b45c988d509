"""DCP's ``.metadata`` without torch: what ``FileSystemReader`` unpickles to find every tensor.

The layout is that of ``torch.distributed.checkpoint.metadata.Metadata``, as ``FileSystemWriter`` pickles it in
version 1.0.0.
"""

from functools import lru_cache

from overnight.trainer.checkpoint.index import Chunk, Index, TensorEntry
from overnight.trainer.checkpoint.writing.opcodes import (
    BEGIN,
    END,
    FALSE,
    NONE,
    built,
    called,
    dict_of,
    integer,
    list_of,
    named,
    recalled,
    remembered,
    text,
    tuple_of,
)

METADATA = ".metadata"
_VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"
_REMEMBERED = (
    named(_MODULE, "TensorStorageMetadata"),
    named(_MODULE, "TensorProperties"),
    named(_MODULE, "ChunkStorageMetadata"),
    named(_MODULE, "MetadataIndex"),
    named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    named("torch", "Size"),
    called(named("torch.serialization", "_get_layout"), text("torch.strided")),
    called(named(_MODULE, "_MEM_FORMAT_ENCODING"), integer(0)),  # contiguous
    *(text(word) for word in ("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset")),
    *(text(word) for word in ("relative_path", "length")),
)
(
    _TENSOR,
    _PROPERTIES,
    _CHUNK,
    _INDEX,
    _STORED,
    _SIZE,
    _LAYOUT,
    _MEMORY_FORMAT,
    _K_PROPERTIES,
    _K_SIZE,
    _K_CHUNKS,
    _K_OFFSETS,
    _K_SIZES,
    _K_FQN,
    _K_INDEX,
    _K_OFFSET,
    _K_RELATIVE_PATH,
    _K_LENGTH,
) = (recalled(number) for number in range(len(_REMEMBERED)))


class Metadata:
    """Makes ``.metadata`` for one checkpoint after the other, anew only if a tensor lies elsewhere than in the last."""

    def __init__(self) -> None:
        self._places: list[tuple[object, ...]] = []
        self._content = b""

    def of(self, index: Index) -> bytes:
        """Content of ``.metadata`` for tensors that are stored as an index says."""
        places: list[tuple[object, ...]] = [
            (key, entry.dtype, entry.shape, *((one.file, one.at, one.shape, one.record) for one in entry.chunks))
            for key, entry in index.items()
        ]
        if not self._content or places != self._places:
            self._places, self._content = places, metadata(index)
        return self._content


def metadata(index: Index) -> bytes:
    """Content of ``.metadata`` for tensors that are stored as an index says."""
    keys = {key: text(key) for key in index}
    state = dict_of((keys[key], _tensor(entry)) for key, entry in index.items())
    storage = dict_of(
        (_place(keys[key], number, chunk), _stored(chunk))
        for key, entry in index.items()
        for number, chunk in enumerate(entry.chunks)
    )
    fields = [("state_dict_metadata", state), ("planner_data", NONE), ("storage_data", storage)]
    fields += [("storage_meta", NONE), ("version", text(_VERSION))]
    body = built(named(_MODULE, "Metadata"), dict_of((text(name), value) for name, value in fields))
    preamble = b"".join(remembered(number, value) for number, value in enumerate(_REMEMBERED))
    return BEGIN + preamble + body + END


@lru_cache(maxsize=4096)
def _size(shape: tuple[int, ...]) -> bytes:
    return called(_SIZE, tuple_of(*(integer(length) for length in shape)))


@lru_cache(maxsize=64)
def _properties(dtype: str) -> bytes:
    """Type, layout, requires_grad, memory format and pin_memory."""
    return built(_PROPERTIES, tuple_of(named("torch", dtype), _LAYOUT, FALSE, _MEMORY_FORMAT, FALSE))


def _tensor(entry: TensorEntry) -> bytes:
    chunks = list_of(
        built(_CHUNK, dict_of([(_K_OFFSETS, _size(chunk.at)), (_K_SIZES, _size(chunk.shape))]))
        for chunk in entry.chunks
    )
    fields = [(_K_PROPERTIES, _properties(entry.dtype)), (_K_SIZE, _size(entry.shape)), (_K_CHUNKS, chunks)]
    return built(_TENSOR, dict_of(fields))


def _place(key: bytes, number: int, chunk: Chunk) -> bytes:
    fields = [(_K_FQN, key), (_K_INDEX, integer(number)), (_K_OFFSET, _size(chunk.at))]
    return built(_INDEX, dict_of(fields))


def _stored(chunk: Chunk) -> bytes:
    offset, length = chunk.record
    fields = [(_K_RELATIVE_PATH, text(chunk.file)), (_K_OFFSET, integer(offset)), (_K_LENGTH, integer(length))]
    return built(_STORED, dict_of(fields))

"""Tracked objects as data: tensors for DCP and JSON for the rest, without pickle wherever that is possible.

Encoding copies no tensor: it names the live ones (leaves), which staging then copies. What is not a tensor is JSON at
once and so of this moment. An object that cannot be saved is refused here, before a file is touched.

What is not a tensor is JSON: scalars, strings, lists and dicts as they are, and what JSON lacks (tuples, bytes, other
keys, numpy arrays) as ``{"$": kind, ...}``. Anything else is stored as ``torch.save`` bytes, but only if ``torch.load``
takes it back with ``weights_only=True``.
"""

import base64
import io
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overnight.core.errors import CorruptCheckpointError, SaveFailedError
from overnight.trainer.checkpoint.sharding import Chunk, Fit, chunk_of, describe, is_sharded, whole_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Json = Any
_MARK = "$"
PLAIN = frozenset((type(None), bool, int, float, str))
"""Types that are JSON as they are."""


class Leaf(NamedTuple):
    """A live tensor of the state, as this rank has it.

    Attributes:
        key: Its name in the checkpoint: the path at which it was found first. The same on all ranks.
        tensor: Detached and strided; on any device, maybe not contiguous or with a conjugate or negative bit. Shares
            memory with what is tracked. Of a DTensor the local shard, which may be empty.
        on: Type of its device.
        whole: Shape of the DTensor that it is a chunk of, else None.
        at: Offset of the chunk in ``whole``. Chunks with the same key and offset on several ranks are replicas of each
            other: one is enough.
    """

    key: str
    tensor: torch.Tensor
    on: str
    whole: tuple[int, ...] | None = None
    at: tuple[int, ...] | None = None


class Encoded:
    """States, taken apart.

    Args:
        objects: JSON by object name; tensors are references to keys.
        leaves: Live tensors by key; memory that is used at several places is one leaf.
        form: Identity of all that is not content; None if it is not known. What has the same one has the same leaves,
            but for their content and address.
    """

    def __init__(self, objects: dict[str, Json], leaves: dict[str, Leaf], form: object | None = None) -> None:
        self._objects = objects
        self._leaves = leaves
        self.form = form

    @property
    def objects(self) -> dict[str, Json]:
        """JSON by object name."""
        return self._objects

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Live tensors by key."""
        return self._leaves

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The live tensors of all leaves, in their order; some may ask for gradients."""
        return [leaf.tensor for leaf in self.leaves.values()]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where each of them begins."""
        return np.array([leaf.tensor.data_ptr() for leaf in self.leaves.values()], dtype=np.uint64)

    def text(self) -> str:
        """The objects as JSON text."""
        return to_text(self.objects)


def to_text(value: Json) -> str:
    """JSON text without spaces."""
    return json.dumps(value, separators=(",", ":"))


def hash_tensor(tensor: torch.Tensor) -> str:
    """xxh3-128 of a CPU tensor's type, shape and bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    digest.update(data)
    return digest.hexdigest()


def encode(states: Mapping[str, Any]) -> Encoded:
    """Takes states apart without copying a tensor.

    Args:
        states: Live state by object name, see :func:`state_of`.

    Raises:
        SaveFailedError: Something in a state cannot be saved; the message names its path.
    """
    walk = Encoding()
    return Encoded(walk.encode_all(states), walk.leaves)


def is_array(value: Any) -> bool:
    """Whether a value is stored as the bytes of a numpy array or scalar."""
    kind = type(value)
    return (isinstance(value, np.generic) or kind in (np.ndarray, np.memmap)) and not value.dtype.hasobject


def bytes_of_array(value: Any) -> torch.Tensor:
    """A flat uint8 tensor of an array's content; it shares the array's memory where that is possible."""
    data = np.ascontiguousarray(value)
    if not data.flags.writeable or not data.itemsize:
        data = np.array(data, copy=True)
    return torch.from_numpy(data.reshape(-1).view(np.uint8) if data.itemsize else np.empty(0, np.uint8))


def _same(leaf: Leaf, other: Leaf) -> bool:
    """Whether two leaves with the same address are the same memory seen alike."""
    one, two = leaf.tensor, other.tensor
    return (
        one.shape == two.shape
        and ((one.is_contiguous() and two.is_contiguous()) or one.stride() == two.stride())
        and one.dtype == two.dtype
        and one.device == two.device
        and (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg())
        and (leaf.whole, leaf.at) == (other.whole, other.at)
    )


_is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass


class Encoding:
    """The walk through states that takes them apart.

    Attributes:
        leaves: What was found.
        seen: The JSON of each tensor and array, in the order of the walk.
        firsts: For each leaf the index in ``seen`` where it was found first.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.seen: list[Json] = []
        self.firsts: list[int] = []
        self._by_memory: dict[int, list[Leaf]] = {}

    def encode_all(self, states: Mapping[str, Any]) -> dict[str, Json]:
        """JSON of each state by object name; see :func:`encode`."""
        objects = {}
        for name, state in states.items():
            try:
                objects[name] = self.encode(state, name)
            except RecursionError:
                raise SaveFailedError(
                    f"{name} is nested too deeply or contains itself", hint="Track flat state."
                ) from None
        return objects

    def encode(self, value: Any, path: str) -> Json:
        """JSON of a value that was found at a path."""
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._usual(value, path)
        if kind in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is list:
            return [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is tuple:
            return {_MARK: "tuple", "items": [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, path)
        if kind is set or kind is frozenset:
            items = [self.encode(item, f"{path} item") for item in value]
            return {_MARK: kind.__name__, "items": sorted(items, key=json.dumps)}
        if kind is bytes:
            return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
        if is_array(value):
            return self._array(value, path)
        return self._opaque(value, path)

    def _mapping(self, value: dict[Any, Any], path: str) -> Json:
        if type(value) is dict and all([type(key) is str and key[:1] != _MARK for key in value]):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        items = [
            [key if type(key) in PLAIN else self.encode(key, f"{path} key"), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        if type(value) is dict:
            return {_MARK: "dict", "items": items}
        extra = self.encode(getattr(value, "_metadata", None), f"{path}._metadata")
        return {_MARK: "odict", "items": items, "metadata": extra}

    def _usual(self, tensor: torch.Tensor, path: str) -> Json:
        """:meth:`_tensor` for nearly all tensors, and in half of its time, for which training waits."""
        address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is torch.strided else 0
        if not address or address in self._by_memory or path in self.leaves or tensor.is_quantized or tensor.is_nested:
            return self._tensor(tensor, path)
        leaf = Leaf(path, tensor.detach() if tensor.requires_grad else tensor, "cpu")
        self._by_memory[address] = [leaf]
        self.leaves[path] = leaf
        self.firsts.append(len(self.seen))
        self.seen.append(found := {_MARK: "tensor", "key": path, "on": "cpu", "shape": list(tensor.shape)})
        return found

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        kind = type(tensor)
        ordinary = kind is torch.Tensor or kind is torch.nn.Parameter
        if not ordinary and is_lazy(tensor):
            raise SaveFailedError(f"{path} is not initialised yet", hint="Run one forward pass before the first save.")
        if tensor.is_meta:
            raise SaveFailedError(
                f"{path} is on the meta device and has no values",
                hint="Give the module memory first: module.to_empty(device=run.device), then initialise it.",
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise SaveFailedError(
                f"{path} is a nested tensor without a shape, which cannot be saved",
                hint="Keep its parts, tensor.unbind(), in a list, or use layout=torch.jagged.",
            )
        if not ordinary and is_sharded(tensor):
            return self._shard(tensor, path)
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, path)
        if tensor.is_quantized or (not ordinary and _is_wrapper(tensor)):
            return self._opaque(tensor, path)
        if tensor.requires_grad:
            tensor = tensor.detach()
        on = "cpu" if tensor.is_cpu else tensor.device.type  # the latter takes 0.7 us
        found = {_MARK: "tensor", "key": self._leaf(tensor, path, on), "on": on, "shape": list(tensor.shape)}
        self.seen.append(found)
        return found

    def _shard(self, tensor: "DTensor", path: str) -> Json:
        try:
            chunk = chunk_of(tensor)
        except SaveFailedError as error:
            raise SaveFailedError(f"{path}: {error.message}", hint=error.hint) from None
        with torch.no_grad():
            local = tensor.to_local().detach()
        shape = tuple(tensor.shape)
        return {
            _MARK: "tensor",
            "key": self._leaf(local, path, local.device.type, shape, chunk.at),
            "on": local.device.type,
            "shape": list(shape),
            "placements": describe(tensor.placements),
        }

    def _leaf(
        self,
        tensor: torch.Tensor,
        path: str,
        on: str,
        whole: tuple[int, ...] | None = None,
        at: tuple[int, ...] | None = None,
    ) -> str:
        memory = tensor.data_ptr()
        if not memory:
            if tensor.numel():
                raise SaveFailedError(
                    f"{path} has no memory: its storage was resized to nothing",
                    hint="Give it memory again before the update ends, or track it only while it has some.",
                )
            memory = tensor.untyped_storage()._cdata
        leaf = Leaf(path if path not in self.leaves else self._unused(path), tensor, on, whole, at)
        here = self._by_memory.get(memory)
        if here is None:
            self._by_memory[memory] = [leaf]
        else:
            for other in here:
                if _same(leaf, other):
                    return other.key
            here.append(leaf)
        self.leaves[leaf.key] = leaf
        self.firsts.append(len(self.seen))
        return leaf.key

    def _sparse(self, tensor: torch.Tensor, path: str) -> Json:
        """Sparse tensors as the strided ones that they consist of."""
        tensor = tensor.detach()
        parts: dict[str, torch.Tensor]
        match tensor.layout:
            case torch.sparse_coo:
                parts = {"indices": tensor._indices(), "values": tensor._values()}
            case torch.sparse_csr | torch.sparse_bsr:
                parts = {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
            case torch.sparse_csc | torch.sparse_bsc:
                parts = {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}
            case _:
                return self._opaque(tensor, path)
        return {
            _MARK: "sparse",
            "layout": str(tensor.layout).removeprefix("torch."),
            "shape": list(tensor.shape),
            "coalesced": tensor.layout is torch.sparse_coo and tensor.is_coalesced(),
            "parts": [self._tensor(part, f"{path}.{name}") for name, part in parts.items()],
        }

    def _unused(self, path: str) -> str:
        key, number = path, 1
        while key in self.leaves:
            number += 1
            key = f"{path}~{number}"
        return key

    def _array(self, value: Any, path: str) -> Json:
        key = self._unused(path)
        self.leaves[key] = Leaf(key, bytes_of_array(value), "cpu")
        self.firsts.append(len(self.seen))
        described = self.encode(np.lib.format.dtype_to_descr(value.dtype), path)
        scalar = isinstance(value, np.generic)
        found = {_MARK: "array", "key": key, "dtype": described, "shape": list(np.shape(value)), "scalar": scalar}
        self.seen.append(found)
        return found

    def _opaque(self, value: Any, path: str) -> Json:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise SaveFailedError(
                f"{path} is a {type(value).__name__}, which cannot be saved ({type(error).__name__})",
                hint="Track it under a name of its own."
                if hasattr(value, "state_dict")
                else "Keep tensors, numbers, strings, lists and dicts in tracked state, or leave this out of it.",
            ) from error
        return {_MARK: "torch", "base64": base64.b64encode(buffer.getvalue()).decode()}


class Read(Protocol):
    """Gives the tensor under a key, or the chunk of it that is asked for, in fresh memory on the CPU."""

    def __call__(self, key: str, chunk: Chunk | None = None, /) -> torch.Tensor:
        """Reads one tensor of a checkpoint."""


def needs(value: Json, fit: Fit = whole_only) -> list[tuple[str, Chunk | None]]:
    """What :func:`decode` will ask of its reader for the same arguments, each once: to be read in one pass.

    Args:
        value: JSON of one object.
        fit: Which tensors shall come back as DTensors.
    """
    found: dict[tuple[str, Chunk | None], None] = {}
    nothing = torch.empty(0)

    def note(key: str, chunk: Chunk | None = None, /) -> torch.Tensor:
        found[key, chunk] = None
        return nothing

    _Walk(note, None, fit, noting=True).decode(value, ())
    return list(found)


def decode(value: Json, read: Read, device: torch.device | None = None, fit: Fit = whole_only) -> Any:
    """The inverse of encoding.

    Args:
        value: JSON of one object.
        read: Tensor by key.
        device: Where tensors go that were saved from an accelerator; None leaves them on the CPU.
        fit: Which tensors shall come back as DTensors, and how they are sharded now.

    Raises:
        CorruptCheckpointError: Unknown marks, or bytes that do not load.
    """
    try:
        return _Walk(read, device, fit).decode(value, ())
    except (KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CorruptCheckpointError(f"saved state cannot be read: {type(error).__name__}: {error}") from error


class _Walk:
    """Rebuilds a value; while ``noting`` only to see what is read on the way."""

    def __init__(self, read: Read, device: torch.device | None, fit: Fit, *, noting: bool = False) -> None:
        self._read = read
        self._device = device
        self._fit = fit
        self._noting = noting
        self._made: dict[tuple[str, Chunk | None], torch.Tensor] = {}

    def decode(self, value: Json, path: tuple[Any, ...]) -> Any:
        if isinstance(value, list):
            return [self.decode(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if _MARK not in value:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        return self._decode_marked(value, path)

    def _decode_marked(self, value: dict[str, Any], path: tuple[Any, ...]) -> Any:
        match value[_MARK]:
            case "tensor":
                return self._tensor(value, path)
            case "tuple":
                return tuple(self.decode(value["items"], path))
            case "set":
                return set(self.decode(value["items"], path))
            case "frozenset":
                return frozenset(self.decode(value["items"], path))
            case "dict":
                return dict(self._items(value["items"], path))
            case "odict":
                result = OrderedDict(self._items(value["items"], path))
                if value["metadata"] is not None:
                    result._metadata = self.decode(value["metadata"], path)  # type: ignore[attr-defined]
                return result
            case "bytes":
                return base64.b64decode(value["base64"])
            case "array":
                return self._array(value, path)
            case "sparse":
                return self._sparse(value, path)
            case "torch":
                return torch.load(io.BytesIO(base64.b64decode(value["base64"])), weights_only=True)
            case other:
                raise ValueError(f"unknown mark {other!r}")

    def _items(self, items: list[list[Json]], path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
        for encoded_key, encoded in items:
            key = self.decode(encoded_key, (*path, "key"))
            yield key, self.decode(encoded, (*path, key))

    def _tensor(self, value: dict[str, Any], path: tuple[Any, ...]) -> torch.Tensor:
        shape = tuple(value["shape"])
        layout = self._fit(path, shape, value.get("placements"))
        chunk = layout.chunk() if layout is not None else None
        place = (value["key"], chunk)
        if place not in self._made:
            tensor = self._read(value["key"]) if chunk is None else self._read(value["key"], chunk)
            if self._device is not None and value["on"] != "cpu":
                tensor = tensor.to(self._device)
            self._made[place] = tensor if layout is None or self._noting else layout.assemble(tensor)
        return self._made[place]

    def _array(self, value: dict[str, Any], path: tuple[Any, ...]) -> Any:
        data = self._read(value["key"])
        if self._noting:
            return None
        dtype = np.lib.format.descr_to_dtype(self.decode(value["dtype"], path))
        array: Any = np.ndarray(value["shape"], dtype, data.numpy().tobytes()).copy()
        return array[()] if value["scalar"] else array

    def _sparse(self, value: dict[str, Any], path: tuple[Any, ...]) -> Any:
        parts = [self._tensor(part, (*path, number)) for number, part in enumerate(value["parts"])]
        if self._noting:
            return None
        if value["layout"] == "sparse_coo":
            coalesced = value["coalesced"] or None
            indices, values = parts
            return torch.sparse_coo_tensor(indices, values, value["shape"], is_coalesced=coalesced)
        outer, inner, values = parts
        with warnings.catch_warnings():  # that this layout is in beta was said where the tensor was made
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_compressed_tensor(
                outer, inner, values, value["shape"], layout=getattr(torch, value["layout"])
            )

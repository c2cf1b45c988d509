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
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from overnight.core.errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from overnight.trainer.checkpoint.sharding import chunk_of, is_sharded

Json = Any
_MARK = "$"
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Leaf:
    """A live tensor of the state, as this rank has it.

    Attributes:
        key: Its name in the checkpoint: the path at which it was found first. The same on all ranks.
        tensor: Detached and strided; on any device, maybe not contiguous or with a conjugate or negative bit. Shares memory
            with what is tracked. Of a DTensor the local shard, which may be empty.
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


@dataclass(frozen=True)
class Encoded:
    """States, taken apart.

    Attributes:
        objects: JSON by object name; tensors are references to keys.
        leaves: Live tensors by key; memory that is used at several places is one leaf.
    """

    objects: dict[str, Json]
    leaves: dict[str, Leaf]


@dataclass
class Snapshot:
    """The state of one rank at one moment; shares no memory with the live objects.

    Attributes:
        step: Updates done.
        objects: JSON by object name; tensors are references to keys.
        tensors: CPU tensors by key.
        position: For the manifest: which loops are open, and where each loader is.
    """

    step: int
    objects: dict[str, Json]
    tensors: dict[str, torch.Tensor]
    position: dict[str, Any] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor: its type, shape and bytes."""
        return {key: hash_tensor(tensor) for key, tensor in self.tensors.items()}

    def content(self, digests: Mapping[str, str]) -> str:
        """One hash of the whole state."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.objects, sorted(digests.items())]).encode())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def hash_tensor(tensor: torch.Tensor) -> str:
    """xxh3-128 of a CPU tensor's type, shape and bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    digest.update(data)
    return digest.hexdigest()


def unwrap(obj: Any) -> Any:
    """The object behind DistributedDataParallel and ``torch.compile``, whose wrappers change the names of its state."""
    while True:
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            obj = obj.module
        elif isinstance(obj, torch.nn.Module) and isinstance(getattr(obj, "_orig_mod", None), torch.nn.Module):
            obj = obj._orig_mod
        else:
            return obj


def require_trackable(name: str, obj: Any) -> None:
    """Checks that an object has a state that can be saved and put back.

    Raises:
        CheckpointError: It has none.
    """
    obj = unwrap(obj)
    if isinstance(obj, dict | torch.Generator | torch.Tensor):
        return
    if not (callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))):
        raise CheckpointError(
            f"{name!r} is a {type(obj).__name__}, which has no state_dict() and load_state_dict()",
            hint="Track modules, optimizers, lr_schedulers, scalers, generators, tensors, dicts, or what has both.",
        )


def state_of(obj: Any) -> Any:
    """The live state of a trackable object; shares memory with it."""
    obj = unwrap(obj)
    if isinstance(obj, dict | torch.Tensor):
        return obj
    if isinstance(obj, torch.Generator):
        return obj.get_state()
    return obj.state_dict()


def put_back(obj: Any, state: Any, device: torch.device) -> None:
    """Gives a saved state to a live object, in place.

    Args:
        obj: What is tracked.
        state: What :func:`decode` returned for it.
        device: Where tensors of plain dicts go that were saved from an accelerator.
    """
    obj = unwrap(obj)
    if isinstance(obj, dict):
        obj.clear()
        obj.update(state)
    elif isinstance(obj, torch.Tensor):
        with torch.no_grad():
            obj.copy_(state)
    elif isinstance(obj, torch.Generator):
        obj.set_state(state)
    else:
        obj.load_state_dict(state)
        if isinstance(obj, torch.optim.Optimizer):
            _keep_dtypes(obj, state, device)


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any], device: torch.device) -> None:
    """Undoes the cast of optimizer state to its parameter's type, which rounds float32 moments of bfloat16 weights."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [index for group in state["param_groups"] for index in group["params"]]
    for param, index in zip(params, ids, strict=True):
        for key, saved in state["state"].get(index, {}).items():
            live = optimizer.state[param].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != saved.dtype:
                optimizer.state[param][key] = saved.to(live.device).clone()


def encode(states: Mapping[str, Any]) -> Encoded:
    """Takes states apart without copying a tensor.

    Args:
        states: Live state by object name, see :func:`state_of`.

    Raises:
        SaveFailedError: Something in a state cannot be saved; the message names its path.
    """
    encoder = _Encoder()
    objects = {}
    for name, state in states.items():
        try:
            objects[name] = encoder.encode(state, name)
        except RecursionError:
            raise SaveFailedError(f"{name} is nested too deeply or contains itself", hint="Track flat state.") from None
    return Encoded(objects, encoder.leaves)


def stage(states: Mapping[str, Any], step: int, position: dict[str, Any] | None = None) -> Snapshot:
    """Copies states into a snapshot.

    Args:
        states: Live state by object name, see :func:`state_of`.
        step: Updates done.
        position: See :class:`Snapshot`.

    Raises:
        SaveFailedError: Something in a state cannot be saved; the message names its path.
    """
    encoded = encode(states)
    for leaf in encoded.leaves.values():
        if leaf.whole is not None:
            raise SaveFailedError(
                f"{leaf.key} is a DTensor; sharded state cannot be copied into a snapshot",
                hint="Track replicated modules (DistributedDataParallel), or gather the state into a plain dict.",
            )
    tensors = {
        key: leaf.tensor.to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()
        for key, leaf in encoded.leaves.items()
    }
    return Snapshot(step, encoded.objects, tensors, position or {})


class _Encoder:
    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is list:
            return [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is tuple:
            return {_MARK: "tuple", "items": [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, path)
        if kind is bytes:
            return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
        if (isinstance(value, np.generic) or kind in (np.ndarray, np.memmap)) and not value.dtype.hasobject:
            return self._array(value, path)
        return self._opaque(value, path)

    def _mapping(self, value: dict[Any, Any], path: str) -> Json:
        if type(value) is dict and all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        items = [[self.encode(k, f"{path} key"), self.encode(v, f"{path}.{k}")] for k, v in value.items()]
        if type(value) is dict:
            return {_MARK: "dict", "items": items}
        extra = self.encode(getattr(value, "_metadata", None), f"{path}._metadata")
        return {_MARK: "odict", "items": items, "metadata": extra}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return self._opaque(tensor, path)
        whole: tuple[int, ...] | None = None
        at: tuple[int, ...] | None = None
        with torch.no_grad():
            local = tensor.detach()
            if is_sharded(local):
                whole, at = tuple(local.shape), chunk_of(local).at
                local = local.to_local()
        memory = local.data_ptr() or local.untyped_storage()._cdata
        place = (memory, tuple(local.shape), local.stride(), local.dtype, str(local.device), whole, at)
        key = self._seen.get(place)
        if key is None:
            key = self._seen[place] = self._unused(path)
            self.leaves[key] = Leaf(key, local, local.device.type, whole, at)
        return {_MARK: "tensor", "key": key, "on": local.device.type, "shape": list(tensor.shape)}

    def _unused(self, path: str) -> str:
        key, number = path, 1
        while key in self.leaves:
            number += 1
            key = f"{path}~{number}"
        return key

    def _array(self, value: Any, path: str) -> Json:
        data = np.ascontiguousarray(value)
        if not data.flags.writeable or not data.itemsize:
            data = np.array(data, copy=True)
        flat = data.reshape(-1).view(np.uint8) if data.itemsize else np.empty(0, np.uint8)
        key = self._unused(path)
        self.leaves[key] = Leaf(key, torch.from_numpy(flat), "cpu")
        described = self.encode(np.lib.format.dtype_to_descr(data.dtype), path)
        scalar = isinstance(value, np.generic)
        return {_MARK: "array", "key": key, "dtype": described, "shape": list(np.shape(value)), "scalar": scalar}

    def _opaque(self, value: Any, path: str) -> Json:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise SaveFailedError(
                f"{path} is a {type(value).__name__}, which cannot be saved ({type(error).__name__})",
                hint="Keep tensors, numbers, strings, lists and dicts in tracked state, or leave this out of it.",
            ) from error
        return {_MARK: "torch", "base64": base64.b64encode(buffer.getvalue()).decode()}


def decode(value: Json, tensors: Callable[[str], torch.Tensor], device: torch.device | None = None) -> Any:
    """The inverse of staging.

    Args:
        value: JSON of one object.
        tensors: Tensor by key.
        device: Where tensors go that were saved from an accelerator; None leaves them on the CPU.

    Raises:
        CorruptCheckpointError: Unknown marks, or bytes that do not load.
    """
    if isinstance(value, list):
        return [decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, tensors, device) for key, item in value.items()}
    try:
        return _decode_marked(value, tensors, device)
    except (KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CorruptCheckpointError(f"saved state cannot be read: {type(error).__name__}: {error}") from error


def _decode_marked(value: dict[str, Any], tensors: Callable[[str], torch.Tensor], device: torch.device | None) -> Any:
    match value[_MARK]:
        case "tensor":
            tensor = tensors(value["key"])
            return tensor.to(device) if device is not None and value["on"] != "cpu" else tensor
        case "tuple":
            return tuple(decode(item, tensors, device) for item in value["items"])
        case "dict":
            return {_hashable(decode(k, tensors)): decode(v, tensors, device) for k, v in value["items"]}
        case "odict":
            result = OrderedDict((decode(k, tensors), decode(v, tensors, device)) for k, v in value["items"])
            if value["metadata"] is not None:
                result._metadata = decode(value["metadata"], tensors)  # type: ignore[attr-defined]
            return result
        case "bytes":
            return base64.b64decode(value["base64"])
        case "array":
            dtype = np.lib.format.descr_to_dtype(decode(value["dtype"], tensors))
            array = np.ndarray(value["shape"], dtype, tensors(value["key"]).numpy().tobytes()).copy()
            return array[()] if value["scalar"] else array
        case "torch":
            return torch.load(io.BytesIO(base64.b64decode(value["base64"])), weights_only=True)
        case other:
            raise ValueError(f"unknown mark {other!r}")


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key

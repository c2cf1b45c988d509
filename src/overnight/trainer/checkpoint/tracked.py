"""What may be tracked, how its state is taken, and how it gets a saved one back in place.

Taking shares memory with the live object; giving back fills the memory that the object has, since others (an optimizer
its parameters, a script its tensors) hold on to it too.
"""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from overnight.core.errors import CheckpointError
from overnight.trainer import generators
from overnight.trainer.checkpoint.modules import state_dict_of
from overnight.trainer.checkpoint.sharding import Fit, Layout, is_sharded, placed

_COMPILED = "_orig_mod."
_TIED_TO_WORLD_SIZE = {"FullyShardedDataParallel", "ZeroRedundancyOptimizer"}


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
    if isinstance(obj, torch.nn.Module):
        _require_memory(name, obj)
    if {cls.__name__ for cls in type(obj).__mro__} & _TIED_TO_WORLD_SIZE:  # by name: their modules import slowly
        raise CheckpointError(
            f"{name!r} is a {type(obj).__name__}, whose state is in pieces that fit one number of ranks only",
            hint="Use torch.distributed.fsdp.fully_shard(module), which shards parameters and optimizer state alike.",
        )
    if not (_has_state(obj) or isinstance(obj, dict | torch.Tensor | np.ndarray) or generators.is_generator(obj)):
        raise CheckpointError(
            f"{name!r} is a {type(obj).__name__}, which has no state_dict() and load_state_dict()",
            hint="Track modules, optimizers, lr_schedulers, scalers, generators, tensors, dicts, or what has both.",
        )


def _require_memory(name: str, module: torch.nn.Module) -> None:
    for path, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            raise CheckpointError(
                f"{path!r} of {name!r} is on the meta device and has no values",
                hint="Give the module memory before it is tracked: module.to_empty(device=run.device).",
            )


def _has_state(obj: Any) -> bool:
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def state_of(obj: Any) -> Any:
    """The live state of a trackable object; shares memory with it."""
    obj = unwrap(obj)
    if isinstance(obj, torch.nn.Module):
        return _module_state(obj)
    if _has_state(obj):
        return obj.state_dict()
    if generators.is_generator(obj):
        return generators.capture(obj)
    return dict(obj) if isinstance(obj, dict) and type(obj) is not dict else obj


def _module_state(module: torch.nn.Module) -> Any:
    state = state_dict_of(module)
    if not any([_COMPILED in key for key in state]):
        return state
    prefixes = {key: _uncompiled(key) for key in getattr(state, "_metadata", ())}
    return _renamed(state, {key: _uncompiled(key) for key in state}, prefixes)


def _uncompiled(name: str) -> str:
    """A name without what ``torch.compile`` of a submodule puts into it."""
    return f"{name}.".replace(_COMPILED, "")[:-1]


def _renamed(state: Any, names: Mapping[str, str], prefixes: Mapping[str, str]) -> Any:
    """A module's state under other names; also what torch notes about its submodules."""
    result = OrderedDict((names.get(key, key), value) for key, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        renamed = OrderedDict((prefixes.get(key, key), value) for key, value in metadata.items())
        result._metadata = renamed  # type: ignore[attr-defined]
    return result


def device_for(obj: Any, device: torch.device) -> torch.device | None:
    """Where the saved tensors of an object are needed that were saved from an accelerator.

    None, the CPU, for what copies them to where it has its own: modules, optimizers, tensors, generators.
    """
    obj = unwrap(obj)
    copies = isinstance(obj, torch.nn.Module | torch.optim.Optimizer | torch.Tensor) or generators.is_generator(obj)
    return None if copies else device


def fit_of(obj: Any) -> Fit:
    """How the live object is sharded: its DTensors give the chunks that are read for it."""
    obj = unwrap(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return _optimizer_fit(obj)
    state = state_of(obj)

    def fit(path: tuple[Any, ...], shape: tuple[int, ...], saved: list[str] | None) -> Layout | None:
        live = state
        for key in path:
            live = live.get(key) if isinstance(live, Mapping) else None
        return Layout.of(live) if is_sharded(live) and tuple(live.shape) == shape else None

    return fit


def _optimizer_fit(optimizer: torch.optim.Optimizer) -> Fit:
    """State is sharded like its parameter; it may not exist yet, so the parameter's layout decides."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def fit(path: tuple[Any, ...], shape: tuple[int, ...], saved: list[str] | None) -> Layout | None:
        if len(path) < 3 or path[0] != "state" or not isinstance(path[1], int) or path[1] >= len(params):
            return None
        param = params[path[1]]
        if not is_sharded(param):
            return None
        if shape == tuple(param.shape):
            return Layout.of(param)
        return placed(param.device_mesh, saved, shape) if saved is not None else None

    return fit


def put_back(obj: Any, state: Any) -> None:
    """Gives a saved state to a live object, in place.

    Args:
        obj: What is tracked.
        state: What was decoded for it, with :func:`fit_of` and :func:`device_for`.

    Raises:
        ValueError, TypeError, RuntimeError, KeyError: The state does not fit; the message says where.
    """
    obj = unwrap(obj)
    if isinstance(obj, torch.nn.Module):
        _load_module(obj, state)
    elif isinstance(obj, torch.optim.Optimizer):
        _load_optimizer(obj, state)
    elif _has_state(obj):
        obj.load_state_dict(state)
    elif generators.is_generator(obj):
        generators.restore(obj, state)
    elif isinstance(obj, dict):
        _refill(obj, state)
    else:
        if (obj.dtype, tuple(obj.shape)) != (state.dtype, tuple(state.shape)):
            raise ValueError(f"it was saved as {state.dtype} {tuple(state.shape)}, not {obj.dtype} {tuple(obj.shape)}")
        _refill_array(obj, state)


def _load_module(module: torch.nn.Module, state: Any) -> None:
    """Loads by torch's rules, but never into another type: that would round without a word."""
    live = module.state_dict()
    if any(_COMPILED in key for key in live):
        prefixes = {_uncompiled(key): key for key in getattr(live, "_metadata", ())}
        state = _renamed(state, {_uncompiled(key): key for key in live}, prefixes)
    for key, saved in state.items():
        here = live.get(key)
        if isinstance(saved, torch.Tensor) and isinstance(here, torch.Tensor) and saved.dtype != here.dtype:
            raise TypeError(f"{key} was saved as {saved.dtype} and is {here.dtype} now")
    module.load_state_dict(state)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    tensors = [
        {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, held in zip(optimizer.param_groups, tensors, strict=True):
        for key, tensor in held.items():  # such as a learning rate that a compiled step or the script holds
            if isinstance(group[key], torch.Tensor) and group[key].shape == tensor.shape:
                group[key] = tensor.copy_(group[key])
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [index for group in state["param_groups"] for index in group["params"]]
    for param, index in zip(params, ids, strict=True):
        if index in state["state"]:
            optimizer.state[param] = _with_types(optimizer.state[param], state["state"][index])


def _with_types(live: Any, saved: Any) -> Any:
    """Undoes the cast of optimizer state to its parameter's type, which rounds float32 moments of bfloat16 weights."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device).clone()
    if type(live) is dict and type(saved) is dict:
        return {key: _with_types(value, saved[key]) if key in saved else value for key, value in live.items()}
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        return type(live)([_with_types(one, other) for one, other in zip(live, saved, strict=True)])
    return live


def _refill(live: Any, saved: Any) -> Any:
    """The saved value, in the memory of the live one where that is of the same kind."""
    if isinstance(live, torch.Tensor | np.ndarray) and type(saved) in (torch.Tensor, np.ndarray, type(live)):
        return _refill_array(live, saved)
    if isinstance(live, dict) and isinstance(saved, dict):
        values = {key: _refill(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(values)
        return live
    if type(live) is list and type(saved) is list and len(live) == len(saved):
        live[:] = [_refill(one, other) for one, other in zip(live, saved, strict=True)]
        return live
    return saved


def _refill_array(live: Any, saved: Any) -> Any:
    if live.dtype != saved.dtype or tuple(live.shape) != tuple(saved.shape):
        return saved
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        with torch.no_grad():
            return live.copy_(saved)
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray) and live.flags.writeable:
        live[...] = saved
        return live
    return saved

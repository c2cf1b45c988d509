"""Which tensors only an optimizer changes, and only in its step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Memory = tuple[int, int]
"""Address and bytes of a tensor."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Where a tensor's content lies; of a DTensor, this rank's part."""
    if type(tensor) not in _PLAIN:
        tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.data_ptr(), tensor.nbytes


def owned_memory(optimizers: Iterable[torch.optim.Optimizer]) -> set[Memory]:
    """The parameters and the state of optimizers, nested state (as that of LBFGS) included."""
    owned: set[Memory] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update([memory_of(param) for param in group["params"]])
        for state in optimizer.state.values():
            _add(owned, state.values() if isinstance(state, Mapping) else (state,))
    return owned


def _add(owned: set[Memory], values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                owned.add(memory_of(value))
        elif isinstance(value, Mapping):
            _add(owned, value.values())
        elif isinstance(value, list | tuple):
            _add(owned, value)


def frozen_memory(objects: Iterable[Any]) -> set[int]:
    """Addresses of the parameters of modules that ask for no gradient."""
    modules = (obj for obj in objects if isinstance(obj, torch.nn.Module))
    return {memory_of(one)[0] for module in modules for one in module.parameters() if not one.requires_grad}

"""Which tensors only an optimizer changes, and only in its step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Memory = tuple[int, int]
"""Address and bytes of a tensor."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Where a tensor's content lies; of a DTensor, this rank's part."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.nbytes


def owned_memory(optimizers: Iterable[torch.optim.Optimizer]) -> set[Memory]:
    """The parameters and the state of optimizers, nested state (as that of LBFGS) included."""
    owned: set[Memory] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update(map(memory_of, group["params"]))
        for state in optimizer.state.values():
            _add(owned, state)
    return owned


def _add(owned: set[Memory], state: Any) -> None:
    if isinstance(state, torch.Tensor):
        if state.layout is torch.strided:
            owned.add(memory_of(state))
    elif isinstance(state, Mapping):
        for value in state.values():
            _add(owned, value)
    elif isinstance(state, list | tuple):
        for value in state:
            _add(owned, value)


def frozen_memory(objects: Iterable[Any]) -> set[int]:
    """Addresses of the parameters of modules that ask for no gradient."""
    modules = (obj for obj in objects if isinstance(obj, torch.nn.Module))
    return {memory_of(one)[0] for module in modules for one in module.parameters() if not one.requires_grad}

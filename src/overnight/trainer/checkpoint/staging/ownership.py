"""Which tensors only an optimizer changes, and only in its step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Memory = dict[int, int]
"""Bytes by address: where tensors have their content."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; other tensors as they are."""
    kind = type(tensor)
    ordinary = kind is torch.Tensor or kind is torch.nn.Parameter
    return tensor if ordinary else getattr(tensor, "_local_tensor", tensor)


def owned_memory(optimizers: Iterable[torch.optim.Optimizer]) -> Memory:
    """The parameters and the state of optimizers, nested state (as that of LBFGS) included."""
    owned: Memory = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _add(owned, group["params"])
        for state in optimizer.state.values():
            _add(owned, state.values() if isinstance(state, Mapping) else (state,))
    return owned


def _add(owned: Memory, values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter or isinstance(value, torch.Tensor):
            tensor = local_part(value)
            if tensor.layout is torch.strided:
                owned[tensor.data_ptr()] = tensor.nbytes
        elif isinstance(value, Mapping):
            _add(owned, value.values())
        elif isinstance(value, list | tuple):
            _add(owned, value)


def frozen_memory(objects: Iterable[Any]) -> set[int]:
    """Addresses of the parameters of modules that ask for no gradient."""
    modules = (obj for obj in objects if isinstance(obj, torch.nn.Module))
    return {local_part(one).data_ptr() for module in modules for one in module.parameters() if not one.requires_grad}


def freed(storages: Sequence[torch.UntypedStorage], addresses: Sequence[int], lengths: Iterable[int]) -> list[int]:
    """Which pieces do not lie in their storage any more: ``resize_`` gives memory away whoever still refers to it.

    Args:
        storages: Of each piece, held since it was there.
        addresses: Where each was.
        lengths: Bytes of each.
    """
    gone = []
    for index, (storage, address, length) in enumerate(zip(storages, addresses, lengths, strict=True)):
        start = storage.data_ptr()
        if not start <= address <= address + length <= start + storage.nbytes():
            gone.append(index)
    return gone

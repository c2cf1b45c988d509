"""Gradients that an interrupted accumulation needs, and none that the next step throws away.

Boundaries lie between updates, so the accumulation that the run itself does (several micro-batches an update) is never
interrupted. A script may accumulate on its own over several updates of the run, though. At a boundary, gradients whose
optimizer has not made a step since the boundary before are taken to be such.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from overnight.trainer.checkpoint.sharding import is_sharded
from overnight.trainer.checkpoint.unreduced import Unreduced

Gradients = dict[str, dict[str, torch.Tensor]]
"""By name of the optimizer, then by number of the group and of the parameter in it: ``"0.3"``."""

_UNREDUCED = ".unreduced"
"""Behind the number of a parameter: its gradient that FSDP2 has not reduced yet."""


def pending_gradients(tracked: Mapping[str, Any], stepped: Collection[int]) -> Gradients:
    """Gradients that wait for a step of a tracked optimizer.

    Args:
        tracked: Objects by name.
        stepped: Identities of the optimizers that have just made one.

    Raises:
        SaveFailedError: There are some that cannot be saved.
    """
    found: Gradients = {}
    waiting = [(name, optimizer) for name, optimizer in _optimizers(tracked) if id(optimizer) not in stepped]
    unreduced = Unreduced(tracked.values() if waiting else ())  # which looks at each module
    for name, optimizer in waiting:
        grads = {key: param.grad for key, param in _params(optimizer)}
        grads |= {f"{key}{_UNREDUCED}": unreduced.of(param) for key, param in _params(optimizer)}
        if present := {key: grad for key, grad in grads.items() if grad is not None}:
            found[name] = present
    return found


def put_gradients_back(tracked: Mapping[str, Any], gradients: Gradients) -> list[str]:
    """Gives parameters their saved gradients.

    Returns:
        What had gradients in the checkpoint and is not there any more.
    """
    missing = sorted(set(gradients) - {name for name, _ in _optimizers(tracked)})
    unreduced = Unreduced(tracked.values())
    for name, optimizer in _optimizers(tracked):
        saved = gradients.get(name, {})
        for key, param in _params(optimizer):
            if key in saved:
                param.grad = _like(param, saved[key])
            if (whole := saved.get(f"{key}{_UNREDUCED}")) is not None:
                unreduced.put_back(param, whole)
    return missing


def _like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not is_sharded(param):
        return grad.to(device=param.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad.to(param.device), param.device_mesh, param.placements, src_data_rank=None)


def _optimizers(tracked: Mapping[str, Any]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    return ((name, obj) for name, obj in tracked.items() if isinstance(obj, torch.optim.Optimizer))


def _params(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            yield f"{number}.{index}", param

"""Gradients that FSDP2 keeps to itself while ``set_requires_gradient_sync(False)`` holds.

They are those of whole parameters, each rank's of its own samples, and come to ``param.grad`` with the next backward
pass that reduces them. A checkpoint in between needs them. torch has no public way to them.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.sharding import is_sharded


class Unreduced:
    """What the sharded modules among some objects keep, by parameter.

    Args:
        objects: Any; only modules under ``fully_shard`` matter.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._owners = {id(one.sharded_param): one for one in _fsdp_params(objects)}

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a whole parameter that no rank has told another yet.

        Raises:
            SaveFailedError: It is sharded itself, over tensor parallelism.
        """
        owner = self._owners.get(id(param))
        if owner is None or not hasattr(owner, "_unsharded_param"):  # which is made by the first forward pass
            return None
        grad: torch.Tensor | None = owner.unsharded_accumulated_grad
        if grad is None:
            grad = owner._unsharded_param.grad
        if is_sharded(grad):
            raise SaveFailedError(
                "gradients that wait for set_requires_gradient_sync(True) under tensor parallelism cannot be saved",
                hint="Leave gradients to be reduced in each backward pass, or accumulate within one update of the run.",
            )
        return grad

    def put_back(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Lets the next backward pass add to a gradient; a parameter that is not sharded any more has none to give."""
        if (owner := self._owners.get(id(param))) is not None:
            owner.unsharded_accumulated_grad = grad.to(param.device)


def _fsdp_params(objects: Iterable[Any]) -> Iterable[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody can have sharded anything
        return
    for obj in objects:
        for module in obj.modules() if isinstance(obj, torch.nn.Module) else ():
            if isinstance(module, fsdp.FSDPModule):
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                for group in groups:
                    yield from group.fsdp_params if group is not None else ()

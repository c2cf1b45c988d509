"""Whether torch reduces gradients after a resume in the order in which it would have without.

DistributedDataParallel adds gradients in buckets, at first in one for all of them; after the first backward pass of a
process it deals them out anew, in the order in which they became ready. Where three or more numbers are added, the
order of the sum, and with it the last bit, depends on the place in the bucket, so that the first update after a resume
is not that of a run which went on. With ``find_unused_parameters=True`` the buckets stay as they were made. Nothing
else makes torch deal them out before the first backward pass in an order that overlaps reducing with computing.
"""

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overnight.trainer.untracked import look

COMMUTATIVE = 2
"""So many numbers have one sum, however they are ordered."""


def warning(tracked: Iterable[Any], frames: Iterable[FrameType]) -> str | None:
    """One line that names what may not resume with the same last bits, and what to do; None if that is nothing.

    Args:
        tracked: What is tracked.
        frames: Of the script, innermost first; their variables are looked at too.
    """
    found = list(tracked)
    for frame in frames:
        look(frame, lambda _, value: found.append(value))
    if not any(_changes_buckets(obj) for obj in found):
        return None
    return (
        "torch deals out the gradients of DistributedDataParallel anew after the first update of each process: with "
        "three or more ranks, the first update after a resume may differ in its last bits. For the same bits give it "
        "find_unused_parameters=True, and not static_graph=True"
    )


def _changes_buckets(obj: Any) -> bool:
    obj = getattr(obj, "_orig_mod", obj)  # torch.compile
    if not isinstance(obj, DistributedDataParallel) or dist.get_world_size(obj.process_group) <= COMMUTATIVE:
        return False
    return bool(obj.static_graph or not obj.find_unused_parameters)

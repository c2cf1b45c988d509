"""What matters of tensors beside their content and address, compared for thousands of them while training waits.

torch has a check for that, made for compiled code: one call for all tensors, in a third of the time that asking each
takes. It is no public interface. So it is tried out on a few tensors first, it may only say yes, and where it is
missing or does not tell forms apart, each tensor is asked.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import eq
from typing import TypeVar

import torch

_T = TypeVar("_T")
_Check = Callable[..., bool]


class Form:
    """Shapes, strides, types, devices and lazy signs of tensors.

    Args:
        tensors: Any; they are not kept.

    Raises:
        RuntimeError: One has no shape or strides: a sparse or nested one, and others.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        of = torch.Tensor
        self._shapes = _interned([tensor.shape for tensor in tensors])
        self._contiguous = list(map(of.is_contiguous, tensors))
        self._strides = [tensor.stride() for tensor in self._scattered(tensors)]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._devices = [tensor.device for tensor in tensors]
        self._negated = list(map(of.is_neg, tensors))
        self._conjugated = list(map(of.is_conj, tensors))
        self._is_complex = any(dtype.is_complex for dtype in set(self._dtypes))
        self._check = _check_for(tensors) if _tells_apart() else None

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether so many other tensors have it."""
        if self._check is not None:
            with suppress(RuntimeError):
                if self._check(*tensors):
                    return True
        try:
            return self._is_of_each(tensors)
        except RuntimeError:
            return False

    def _is_of_each(self, tensors: Sequence[torch.Tensor]) -> bool:
        of = torch.Tensor
        return (
            all(map(eq, map(of.size, tensors), self._shapes))
            and list(map(of.is_contiguous, tensors)) == self._contiguous
            and [tensor.stride() for tensor in self._scattered(tensors)] == self._strides
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and [tensor.device for tensor in tensors] == self._devices
            and list(map(of.is_neg, tensors)) == self._negated
            and (not self._is_complex or list(map(of.is_conj, tensors)) == self._conjugated)
        )

    def _scattered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those whose memory is not their content in order: only of these the strides matter."""
        return [tensor for tensor, contiguous in zip(tensors, self._contiguous, strict=True) if not contiguous]


def _interned(values: list[_T]) -> list[_T]:
    """Equal ones as the same object: a few are at hand in the processor's cache, and thousands are not."""
    known: dict[_T, _T] = {}
    return [known.setdefault(value, value) for value in values]


# -- torch's own check ------------------------------------------------------------------------------------------------


def _check_for(tensors: Sequence[torch.Tensor]) -> _Check:
    """Says of so many others whether they have the same type, shape, strides, dtype, device and lazy signs."""
    from torch._C._dynamo.guards import TensorGuards

    with torch.enable_grad():  # else it would take parameters for tensors that ask for no gradient
        check: _Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _tells_apart() -> bool:
    """Whether this torch has the check, and it knows the differences that matter here."""
    try:
        return all(_is_exact_for(*example) for example in _examples())
    except Exception:  # whatever an interface raises that has changed
        return False


def _is_exact_for(make: Callable[[], torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    check = _check_for([make()])
    return bool(check(make())) and not any(map(check, others))


def _examples() -> list[tuple[Callable[[], torch.Tensor], list[torch.Tensor]]]:
    """Tensors, and for each others that are to be told from it."""
    table, wave = torch.zeros(2, 3), torch.zeros(2, dtype=torch.complex64)
    others = [
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, 1),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
        torch._neg_view(table),
        table.to_sparse(),
    ]
    return [
        (lambda: torch.zeros(2, 3), others),
        (lambda: torch.zeros(3, 2).t(), [table]),
        (lambda: torch._neg_view(torch.zeros(2, 3)), [table]),
        (lambda: torch.zeros(2, dtype=torch.complex64), [wave.conj(), torch.zeros(2)]),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), [wave]),
    ]

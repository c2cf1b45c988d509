"""Refuses arguments of a loader that cannot mean anything, each with what to write instead."""

from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset

from overnight.core.errors import BadInputError


def require_map_style(dataset: Any) -> None:
    """A data set needs positions: ``__getitem__`` and ``__len__``."""
    if isinstance(dataset, IterableDataset):
        raise BadInputError(
            f"{type(dataset).__name__} is an IterableDataset, which has no positions to continue from",
            hint="Give it __getitem__ and __len__ (a map-style data set), or iterate it yourself inside run.steps().",
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadInputError(
            f"{type(dataset).__name__} is not a map-style data set",
            hint="It needs __getitem__(index) and __len__().",
        )


def require_sizes(batch_size: int | None, global_batch_size: int | None, micro_batch_size: int | None) -> None:
    """Either ``batch_size``, or ``global_batch_size`` with or without ``micro_batch_size``; all positive."""
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise BadInputError(
                f"{name} must be a positive integer, not {size!r}", hint="Leave it out for the default."
            )
    if batch_size is not None and (global_batch_size is not None or micro_batch_size is not None):
        raise BadInputError(
            "batch_size excludes global_batch_size and micro_batch_size",
            hint="batch_size is per rank, every batch an update; the other two accumulate to a fixed global batch.",
        )
    if micro_batch_size is not None and global_batch_size is None:
        raise BadInputError("micro_batch_size needs global_batch_size", hint="Or pass batch_size alone.")


def require_one_order(*, shuffle: bool, sampler: Any, weights: Any, mixture: Any, num_samples: int | None) -> None:
    """At most one of ``shuffle``, ``sampler``, ``weights`` and ``mixture``."""
    orders = {"shuffle": shuffle or None, "sampler": sampler, "weights": weights, "mixture": mixture}
    given = [name for name, value in orders.items() if value is not None]
    if len(given) > 1:
        raise BadInputError(f"{' and '.join(given)} exclude each other", hint="Pass one of them.")
    if num_samples is not None and ((weights is None and mixture is None) or num_samples < 1):
        raise BadInputError(
            "num_samples is the number of draws per epoch, at least 1", hint="Pass it with weights= or mixture=."
        )


def parts_of(dataset: Any) -> list[int]:
    """Lengths of the data sets that were concatenated to one."""
    if not isinstance(dataset, ConcatDataset):
        raise BadInputError(
            f"mixture= mixes the parts of a torch.utils.data.ConcatDataset, not of a {type(dataset).__name__}",
            hint="Like DataLoader(ConcatDataset([books, web]), mixture=[0.3, 0.7]).",
        )
    return [len(part) for part in dataset.datasets]  # type: ignore[arg-type]


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise BadInputError(f"{name}={value!r} is not one of {', '.join(choices)}", hint=f"Pass {name}={choices[0]!r}.")

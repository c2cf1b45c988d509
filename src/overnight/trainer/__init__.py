"""What a training script imports: the run, its data, its checkpoints.

::

    from overnight import trainer

    with trainer.run(defaults={"lr": 1e-3}) as run:
        model = build(run.params).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.params["lr"])
        loader = trainer.DataLoader(dataset, batch_size=64, shuffle=True)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(loader, epochs=3):
            ...

The same script runs under ``python``, ``torchrun`` and ``overnight``. Alone, its folder is
``.overnight/<script>/<hash of params>``: the same command goes on where it stopped, ``--fresh`` starts anew.

Torch comes with the first name that needs it, so that whoever only reads sample records does without. Importing any
module of this package runs no torch operator, draws no random number, asks no GPU and starts no thread: a warm process
imports :mod:`overnight.trainer.execution`, which brings all that a script needs, and forks later.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overnight.trainer.exits import EXIT_LEFT, Interrupted, Left, Stopped, Yielded

if TYPE_CHECKING:
    from overnight.trainer.boundary import Every
    from overnight.trainer.checkpoint.export import export
    from overnight.trainer.checkpoint.reader import inspect, newest_good
    from overnight.trainer.checkpoint.reading.dcp import StagedReader
    from overnight.trainer.data.loader import DataLoader
    from overnight.trainer.execution import Run

__all__ = [
    "EXIT_LEFT",
    "DataLoader",
    "Interrupted",
    "Left",
    "Run",
    "StagedReader",
    "Stopped",
    "Yielded",
    "export",
    "inspect",
    "newest_good",
    "run",
]

_HOMES = {
    "DataLoader": "overnight.trainer.data.loader",
    "Run": "overnight.trainer.execution",
    "StagedReader": "overnight.trainer.checkpoint.reading.dcp",
    "export": "overnight.trainer.checkpoint.export",
    "inspect": "overnight.trainer.checkpoint.reader",
    "newest_good": "overnight.trainer.checkpoint.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def run(
    defaults: Mapping[str, Any] | None = None,
    *,
    every: "Every" = "auto",
    keep: int = 2,
    keep_every: int | None = None,
    keep_best: tuple[str, str] | tuple[str, str, int] | None = None,
    fresh: bool = False,
    seed: int = 0,
) -> "Run":
    """A run, to be used as ``with trainer.run(...) as run:``.

    Args:
        defaults: Params with their default values; these also give the types of ``--name value`` flags. Under overnight
            the trial's params overlay them.
        every: When to checkpoint: a number of updates, a time such as ``"30s"`` or ``"5m"``, ``"epoch"``, ``"auto"``
            (an interval from what saves cost and how often ranks fail), several of these in a tuple, or None for only
            at yields and at the end.
        keep: The newest so many checkpoints stay, at least 1.
        keep_every: The first checkpoint at or after each multiple of so many updates stays too.
        keep_best: The best checkpoints by a metric that the script reports stay too: ``("val_loss", "min")`` the best
            one, ``("val_accuracy", "max", 3)`` three.
        fresh: Ignore earlier checkpoints of this run, as the flag ``--fresh`` does.
        seed: Used when the trial does not bring one. Python, numpy and torch are seeded from it on entry (the same on
            all ranks, so that weights start equal) and again, per rank, when the first loop begins.

    Raises:
        BadInputError: A rule about checkpoints that makes no sense; on entry, a param, flag or variable that cannot be
            right.
        NoUsableCheckpointError: On entry: there are checkpoints, but none that can be used.
        FencedError: On entry: a newer start of the same trial owns its checkpoints.
    """
    from overnight.trainer.checkpoint.retention import Retention
    from overnight.trainer.execution import Run

    best = (*keep_best, 1) if isinstance(keep_best, tuple) and len(keep_best) == 2 else keep_best
    return Run(defaults or {}, every=every, retention=Retention(keep, keep_every, best), fresh=fresh, seed=seed)

"""Warm starts: a new run that begins with what another one learned, be it weights only or all of its tracked state.

Unlike a resume, nothing of the other run's position is taken over: step, loops, order of data and random numbers begin
anew. A run that is itself resumed has its state already, so its warm start does nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from overnight.core.addresses import shown
from overnight.core.errors import BadInputError, CheckpointError, CorruptCheckpointError
from overnight.trainer.checkpoint.export import opened
from overnight.trainer.checkpoint.reading.finding import Reader, complain, together
from overnight.trainer.checkpoint.tracked import device_for, fit_of, put_back, state_of, unwrap
from overnight.trainer.warm_source import choose_source, read_file, trial_place

What = Literal["weights", "all"]

_WRAPPERS = ("module.", "_orig_mod.")
_WEIGHTS = ("model", "model_state_dict", "state_dict", "module", "weights")
"""Under which names training scripts keep a model's state in a file."""


@dataclass(frozen=True)
class WarmStart:
    """Where a run may begin from, and what it has to fill.

    Attributes:
        tracked: The run's objects by name.
        device: Of the run.
        reader: This rank.
        trial_dir: Persistent folder of this run's trial; those of other trials lie beside it.
        holder: Who reads, for whoever wants to delete what is read.
    """

    tracked: Mapping[str, Any]
    device: torch.device
    reader: Reader
    trial_dir: Path
    holder: str

    def begin(
        self,
        *,
        from_trial: str | None = None,
        step: int | None = None,
        path: str | Path | None = None,
        what: What = "weights",
        strict: bool = True,
    ) -> list[str]:
        """Fills the tracked objects; all ranks call it.

        Args:
            from_trial: Name or id of another trial of this home.
            step: Which of its checkpoints; without, its newest good one.
            path: Instead: folder or URL of a checkpoint or checkpoint place, a ``torch.save`` file, or a
                ``.safetensors`` file.
            what: ``"weights"`` fills modules only, ``"all"`` every tracked object that is there.
            strict: Every tensor of a module must be there with its shape, and no other. Otherwise what fits is taken,
                and the rest named.

        Returns:
            Names of the objects that were filled.

        Raises:
            BadInputError: Not exactly one source, an unknown ``what``, or nothing in the source fits anything.
            NotFoundError: No such trial or checkpoint.
            CheckpointError: The source is damaged, or does not fit; what was filled until then stays so.
        """
        if (from_trial is None) == (path is None):
            raise BadInputError("a warm start needs from_trial= or path=", hint="One of the two, not both.")
        if what not in ("weights", "all"):
            raise BadInputError(f"what={what!r} is neither 'weights' nor 'all'", hint="Weights alone, or everything.")
        wanted = self._wanted(what)
        source, is_file = self._agree(from_trial, step, path)
        if is_file:
            return self._from_file(Path(source), wanted, strict)
        text = shown(source)
        with _naming(text), opened(source, self.holder) as (restored, _):
            names = [name for name in wanted if name in restored.names]
            self._require(names, text, [name for name in restored.names if not name.startswith("$")])

            def state(name: str) -> Any:
                obj = wanted[name]
                return restored.state(name, device_for(obj, self.device), fit_of(obj))

            self._fill({name: state for name in names}, text, strict)
        return names

    def _wanted(self, what: What) -> dict[str, Any]:
        modules = {name: obj for name, obj in self.tracked.items() if isinstance(unwrap(obj), torch.nn.Module)}
        wanted = modules if what == "weights" else dict(self.tracked)
        if not wanted:
            raise BadInputError(
                "a warm start fills what is tracked, and nothing is", hint="Call run.track(model=…) before it."
            )
        return wanted

    def _agree(self, from_trial: str | None, step: int | None, path: str | Path | None) -> tuple[str, bool]:
        """One source for all ranks, chosen by rank 0: the other trial may be running, and save meanwhile."""

        def choose() -> tuple[str, bool] | None:
            if self.reader.rank > 0:
                return None
            return choose_source(str(path) if from_trial is None else trial_place(self.trial_dir, from_trial), step)

        source: tuple[str, bool] = self.reader.gather(together(self.reader, choose))[0]
        return source

    def _from_file(self, file: Path, wanted: Mapping[str, Any], strict: bool) -> list[str]:
        states = matching(read_file(file), wanted)
        self._require(list(states), str(file), ["no state of one of these objects"])
        self._fill({name: lambda name: states[name] for name in states}, str(file), strict)
        return list(states)

    def _require(self, names: Sequence[str], source: str, there: Sequence[str]) -> None:
        if not names:
            held = f"it holds {', '.join(there)}; " if there else ""
            raise BadInputError(
                f"{source} has nothing for this run: {held}the run tracks {', '.join(self.tracked)}",
                hint="Track objects under the names that they have there.",
            )

    def _fill(self, states: Mapping[str, Callable[[str], Any]], source: str, strict: bool) -> None:
        for name, state_for in states.items():
            obj = self.tracked[name]
            try:
                state = state_for(name)
                if not strict and isinstance(unwrap(obj), torch.nn.Module):
                    state = self._fitting(name, state, state_of(obj), source)
                put_back(obj, state)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{name!r} does not fit what {source} has for it: {error}",
                    hint="Build the same object, or take only what fits: strict=False.",
                ) from error
        if self.reader.rank == 0:
            complain(f"warm start from {source}: {', '.join(states)}")

    def _fitting(self, name: str, saved: Any, live: Any, source: str) -> Any:
        """The live state, with what is saved for it in the same shape and type.

        Raises:
            BadInputError: That is nothing.
        """
        result = live.copy()
        fits = {key for key, value in saved.items() if key in live and _alike(value, live[key])}
        if live and not fits:
            raise BadInputError(
                f"nothing that {source} has for {name!r} fits: no tensor has the name, shape and type of one here",
                hint="Compare the names and types in that file with those of the module.",
            )
        result.update((key, saved[key]) for key in fits)
        left = [f"{key} stays as it is" for key in live if key not in fits]
        left += [f"{key} is not taken" for key in saved if key not in live]
        if left and self.reader.rank == 0:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            complain(f"warm start of {name!r}: {', '.join(left[:5])}{more}")
        return result


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Says of which checkpoint the damaged file is."""
    try:
        yield
    except CorruptCheckpointError as error:
        if source in error.message:
            raise
        raise CorruptCheckpointError(
            f"{source} is damaged: {error.message}", hint=error.hint or "Copy it anew, or begin from another one."
        ) from error


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other)


def matching(content: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds for which object.

    A file is either a state by itself, which is then that of the module ``model`` or of the only one, or a dict with
    states under the names of the objects, with or without ``_state_dict``. Names of modules that were saved inside a
    wrapper lose its prefix.

    Args:
        content: Of the file.
        wanted: Objects by name.
    """
    if not isinstance(content, Mapping):
        return {}
    modules = [name for name, obj in wanted.items() if isinstance(unwrap(obj), torch.nn.Module)]
    main = "model" if "model" in modules else modules[0] if len(modules) == 1 else None
    found: dict[str, Any] = {}
    for name in wanted:
        names = (name, f"{name}_state_dict", f"{name}_state", *(_WEIGHTS if name == main else ()))
        key = next((key for key in names if isinstance(content.get(key), Mapping)), None)
        if key is not None:
            found[name] = _unwrapped(content[key]) if name in modules else content[key]
    if not found and main is not None and any(isinstance(value, torch.Tensor) for value in content.values()):
        found[main] = _unwrapped(content)
    return found


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    for prefix in _WRAPPERS:
        if state and all(str(key).startswith(prefix) for key in state):
            return _unwrapped({str(key).removeprefix(prefix): value for key, value in state.items()})
    return dict(state)

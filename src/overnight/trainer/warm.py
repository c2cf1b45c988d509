"""Warm starts: a new run that begins with what another one learned, be it weights only or all of its tracked state.

Unlike a resume, nothing of the other run's position is taken over: step, loops, order of data and random numbers begin
anew. A run that is itself resumed has its state already, so its warm start does nothing.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from overnight.core.errors import BadInputError, CheckpointError, CorruptCheckpointError, NotFoundError
from overnight.trainer.checkpoint.export import opened
from overnight.trainer.checkpoint.place import CheckpointName, open_place
from overnight.trainer.checkpoint.reading.finding import Reader, complain, newest_good, together
from overnight.trainer.checkpoint.safetensors import read_safetensors
from overnight.trainer.checkpoint.tracked import device_for, fit_of, put_back, state_of, unwrap

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
        source = self._agree(from_trial, step, path)
        if Path(source).is_file():
            return self._from_file(Path(source), wanted, strict)
        with opened(source, self.holder) as (restored, _):
            names = [name for name in wanted if name in restored.names]
            self._require(names, source, [name for name in restored.names if not name.startswith("$")])

            def state(name: str) -> Any:
                obj = wanted[name]
                return restored.state(name, device_for(obj, self.device), fit_of(obj))

            self._fill({name: state for name in names}, source, strict)
        return names

    def _wanted(self, what: What) -> dict[str, Any]:
        modules = {name: obj for name, obj in self.tracked.items() if isinstance(unwrap(obj), torch.nn.Module)}
        wanted = modules if what == "weights" else dict(self.tracked)
        if not wanted:
            raise BadInputError(
                "a warm start fills what is tracked, and nothing is", hint="Call run.track(model=…) before it."
            )
        return wanted

    def _agree(self, from_trial: str | None, step: int | None, path: str | Path | None) -> str:
        """One source for all ranks, chosen by rank 0: the other trial may be running, and save meanwhile."""

        def choose() -> str | None:
            if self.reader.rank > 0:
                return None
            place = str(path) if from_trial is None else trial_place(self.trial_dir, from_trial)
            if not Path(place).is_file():
                return choose_checkpoint(place, step)
            if step is not None:
                raise BadInputError(f"{place} is a file, which has no step {step}", hint="Leave step= out.")
            return place

        source: str = self.reader.gather(together(self.reader, choose))[0]
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


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other)


def choose_checkpoint(place: str, step: int | None) -> str:
    """Path or URL of one checkpoint.

    Args:
        place: A checkpoint, or a place of them.
        step: Which, if it is a place; the one of the newest token where several have that step.

    Raises:
        BadInputError: It is a checkpoint of another step.
        NotFoundError: There is none, or none of that step.
        NoUsableCheckpointError: There are some, but none that can be used.
    """
    if (one := CheckpointName.parse(place.rstrip("/").rpartition("/")[2])) is not None:
        if step not in (None, one.step):
            raise BadInputError(f"{place} is not the checkpoint of step {step}", hint="Give its place, or no step=.")
        return place
    found = open_place(place)
    if step is not None:
        names = [name for name in found.checkpoints() if name.step == step]
        if not names:
            steps = sorted({name.step for name in found.checkpoints()})
            raise NotFoundError(f"{place} holds no checkpoint of step {step}", hint=f"It has steps {steps or 'none'}.")
        return f"{found}/{names[-1]}"
    if (newest := newest_good(found)) is None:
        raise NotFoundError(f"{place} holds no checkpoint", hint="Has that run saved one already?")
    return f"{found}/{newest[0]}"


def trial_place(trial_dir: Path, trial: str) -> str:
    """The checkpoint place of another trial of the same home.

    The folders of trials are named by their ids; their names stand in the orders of their attempts.

    Args:
        trial_dir: The folder of this trial.
        trial: Name or id.

    Raises:
        NotFoundError: There is no such trial here.
    """
    for folder in (trial_dir.parent / trial, *sorted(trial_dir.parent.iterdir())):
        for order in _orders(folder):
            if trial in (order.get("trial_id"), order.get("trial_name")):
                return str(order.get("checkpoints") or folder / "checkpoints")
    raise NotFoundError(
        f"there is no trial {trial} beside {trial_dir}",
        hint="Give the name or id of a trial that ran in this home, or path= with its checkpoints.",
    )


def _orders(folder: Path) -> list[dict[str, Any]]:
    """Orders of a trial's attempts, newest first."""
    found = []
    for path in sorted(folder.glob("attempts/*/order.json"), reverse=True):
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(body, dict):
            found.append(body)
    return found


def read_file(file: Path) -> Any:
    """What a ``torch.save`` or safetensors file holds; nothing in it is executed.

    Raises:
        CorruptCheckpointError: It cannot be read.
    """
    try:
        if file.suffix == ".safetensors":
            return read_safetensors(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
        _require_sums(file)
        return content
    except CorruptCheckpointError:
        raise
    except Exception as error:  # torch raises what pickle, zipfile and its own reader do
        raise CorruptCheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {str(error)[:300]}",
            hint="It must be readable with torch.load(weights_only=True): tensors, numbers, strings, lists and dicts.",
        ) from error


def _require_sums(file: Path) -> None:
    """Compares a file's bytes with its own check sums, which ``torch.load`` does not look at.

    Raises:
        CorruptCheckpointError: A byte was altered.
    """
    if not zipfile.is_zipfile(file):
        return  # the form before torch 1.6, which has no sums
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.CRC:
                continue  # torch.serialization.set_crc32_options(False)
            try:
                with archive.open(entry) as stream:
                    while stream.read(1 << 20):
                        pass
            except zipfile.BadZipFile as error:
                raise CorruptCheckpointError(f"{file} is damaged: {error}", hint="Copy it anew.") from None


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

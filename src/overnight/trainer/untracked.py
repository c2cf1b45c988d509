"""What the script trains with but does not track: at the first save, it is named before it can be missed at a resume.

Looked at are the variables of the script's frames, of their modules, and one level inside what they hold (attributes of
objects, elements of lists and dicts). Named are optimizers, lr_schedulers and GradScalers, and modules that take part
in the training: in training mode, or with a parameter that an optimizer owns or that has a gradient. So a frozen
teacher in ``eval()`` is not named, an average of weights that was left in training mode is. A module whose every
parameter is tracked as part of another one counts as tracked.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from overnight.trainer.checkpoint.tracked import unwrap

_KINDS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_MAX_FRAMES = 30
_MAX_INSIDE = 1000
_LIBRARIES = ("torch", "overnight")
_PLAIN = (str, bytes, int, float, bool, type(None), torch.Tensor, type, ModuleType)


def warning(tracked: Mapping[str, Any]) -> str | None:
    """One line that names what the calling script trains with but does not track, None if that is nothing.

    Args:
        tracked: What is tracked, by name.
    """
    found = untracked(tracked, script_frames())
    if not found:
        return None
    names = ", ".join(f"{name} ({type(obj).__name__})" for name, obj in found.items())
    return (
        f"not tracked, and so not as before in a resumed run: {names}. Add them to run.track(...); "
        "what never changes is not named in eval() mode"
    )


def script_frames() -> list[FrameType]:
    """The frames of the running script, innermost first: those outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        if not _is_library(frame.f_globals.get("__name__", "")):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _is_library(module: str) -> bool:
    return module.split(".", 1)[0] in _LIBRARIES


def untracked(tracked: Mapping[str, Any], frames: Iterable[FrameType]) -> dict[str, Any]:
    """What takes part in the training but is not tracked, by the name that the script has for it.

    Args:
        tracked: What is tracked, by name.
        frames: Where to look, innermost first.
    """
    found: dict[int, tuple[str, Any]] = {}

    def take(name: str, value: Any) -> None:
        if isinstance(obj := unwrap(value), _KINDS):
            found.setdefault(id(obj), (name, obj))

    for frame in frames:
        look(frame, take)
    covered = _Covered(tracked.values())
    optimizers = [obj for _, obj in found.values() if isinstance(obj, torch.optim.Optimizer)]
    owned = {id(param) for optimizer in (*optimizers, *covered.optimizers) for param in _params(optimizer)}
    left = [(name, obj) for name, obj in found.values() if not covered.has(obj) and _matters(obj, owned)]
    inside = {id(part) for _, obj in left for part in _parts(obj)}
    return {name: obj for name, obj in left if id(obj) not in inside}


def look(frame: FrameType, take: Callable[[str, Any], Any]) -> None:
    """Calls ``take`` with the name and value of each variable that a frame sees, and with what is one level inside."""
    variables = frame.f_locals
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    try:
        _look(variables, take)
        if variables is not frame.f_globals:
            _look(frame.f_globals, take)
    finally:
        if is_copy:  # the frame keeps this copy, which would keep a step's tensors alive
            variables.clear()


def _look(variables: Mapping[str, Any], take: Callable[[str, Any], Any]) -> None:
    """Variables first, so that what is in one goes by its name."""
    named = [(name, value) for name, value in list(variables.items()) if not name.startswith("__")]
    held = [(name, value) for name, value in named if not isinstance(value, _PLAIN)]
    deeper = (found for name, value in held for found in _inside(name, value))
    for name, value in chain(held, deeper):
        take(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Elements and attributes, one level deep; not those of torch's own objects."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = ((f"{name}[{key!r}]", item) for key, item in value.items())
        num_items = len(value)
    elif isinstance(value, list | tuple | set | frozenset):
        items = ((f"{name}[{number}]", item) for number, item in enumerate(value))
        num_items = len(value)
    elif isinstance(value, _KINDS) or _is_library(type(value).__module__) or not hasattr(value, "__dict__"):
        return
    else:
        items = ((f"{name}.{key}", item) for key, item in vars(value).items())
        num_items = len(vars(value))
    if num_items <= _MAX_INSIDE:
        yield from list(items)


class _Covered:
    """What is tracked, and what is a part of that."""

    def __init__(self, tracked: Iterable[Any]) -> None:
        objects = [unwrap(obj) for obj in tracked]
        objects += [unwrap(inner) for obj in objects if not isinstance(obj, _KINDS) for _, inner in _inside("", obj)]
        self.optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        self._ids = {id(part) for obj in objects for part in (obj, *_parts(obj))}
        modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        self._tensors = {id(tensor) for module in modules for tensor in _tensors(module)}

    def has(self, obj: Any) -> bool:
        """Whether it needs no tracking of its own."""
        if id(obj) in self._ids:
            return True
        return isinstance(obj, torch.nn.Module) and all(id(tensor) in self._tensors for tensor in _tensors(obj))


def _parts(obj: Any) -> Iterator[Any]:
    """What is saved with an object: the modules inside a module, the schedulers inside a scheduler."""
    if isinstance(obj, torch.nn.Module):
        modules = obj.modules()
        next(modules)
        yield from modules
    elif isinstance(obj, LRScheduler):
        yield from getattr(obj, "_schedulers", ())


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _matters(obj: Any, owned: set[int]) -> bool:
    if isinstance(obj, torch.amp.GradScaler):
        return obj.is_enabled()
    if not isinstance(obj, torch.nn.Module):
        return True
    if isinstance(obj, AveragedModel):
        return True
    params = list(obj.parameters())
    return bool(params) and (obj.training or any(id(one) in owned or one.grad is not None for one in params))

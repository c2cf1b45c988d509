"""A run's params: the script's defaults, overlaid by the trial's params or, alone, by flags on the command line.

Types come from the defaults: ``--lr 3`` for a default of ``1e-3`` is ``3.0``. Params nest, and a dotted name reaches
inside: ``--opt.lr 3e-4`` and ``params["opt.lr"]`` both mean ``params["opt"]["lr"]``.
"""

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overnight.core.canonical import canonical, loads_strict
from overnight.core.errors import InvalidParamsError

_BOOLS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


class Params(dict[str, Any]):
    """A dict whose dotted keys reach inside, and whose ``KeyError`` says which names exist."""

    def __missing__(self, key: str) -> Any:
        node: Any = dict(self)
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                raise KeyError(f"no param {key!r}; there are: {', '.join(sorted(names(self))) or 'none'}")
            node = node[part]
        return node


@dataclass(frozen=True)
class Parsed:
    """What the command line said.

    Attributes:
        values: Params by (dotted) name.
        fresh: Whether ``--fresh`` was given.
        rest: Arguments that are none of ours, for the script.
    """

    values: dict[str, Any]
    fresh: bool
    rest: list[str]


def names(params: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all leaves."""
    found: list[str] = []
    for key, value in params.items():
        name = f"{prefix}{key}"
        found += names(value, f"{name}.") if isinstance(value, Mapping) and value else [name]
    return found


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Params:
    """Overlays ``given`` on ``defaults``.

    Args:
        defaults: The script's own values; they also say which type each param has.
        given: Values by plain or dotted name; dashes fit underscores; unknown names are kept.

    Returns:
        A deep copy; neither argument is touched.

    Raises:
        InvalidParamsError: A value is not JSON-able, or not of the default's type.
    """
    result = Params(copy.deepcopy(dict(defaults)))
    canonical(dict(result), "defaults")
    known = set(names(defaults))
    for name, value in given.items():
        plain = name.replace("-", "_")
        # ``--weight-decay`` on a command line means the script's ``weight_decay``: kept apart, it would be ignored.
        _assign(result, plain if name not in known and plain in known else name, value, name)
    return result


def from_json(text: str) -> dict[str, Any]:
    """Params from JSON text.

    Raises:
        InvalidParamsError: Not JSON, or no object.
    """
    value = loads_strict(text)
    if not isinstance(value, dict):
        raise InvalidParamsError(f"OVERNIGHT_PARAMS is a {type(value).__name__}", hint='Write it like {"lr": 0.001}.')
    return value


def parse_flags(argv: Sequence[str], defaults: Mapping[str, Any]) -> Parsed:
    """Finds ``--name value``, ``--name=value``, ``--flag`` and ``--no-flag`` for known names; leaves everything else.

    Args:
        argv: Arguments without the script's name. ``--`` ends what is ours.
        defaults: The known params, with the types of their values.

    Raises:
        InvalidParamsError: A known name with a missing value or one of another type.
    """
    known = {name.replace("-", "_"): value for name, value in _leaves(defaults).items()}
    values: dict[str, Any] = {}
    rest: list[str] = []
    fresh = False
    items = list(argv)
    while items:
        item = items.pop(0)
        if item == "--":
            rest += [item, *items]
            break
        flag, has_value, text = item[2:].partition("=") if item.startswith("--") else ("", "", "")
        name = flag.replace("-", "_")
        if name == "fresh" and "fresh" not in known and not has_value:
            fresh = True
        elif name in known and isinstance(known[name], bool) and not has_value:
            values[name] = _BOOLS.get(items.pop(0).lower()) if items and items[0].lower() in _BOOLS else True
        elif name.startswith("no_") and isinstance(known.get(name[3:]), bool) and not has_value:
            values[name[3:]] = False
        elif name in known:
            if not has_value and not items:
                raise InvalidParamsError(f"--{flag} has no value", hint=f"Write it like --{flag} {known[name]}.")
            values[name] = _parse(flag, text if has_value else items.pop(0), known[name])
        else:
            rest.append(item)
    return Parsed(values, fresh, rest)


def usage(script: str, defaults: Mapping[str, Any]) -> str:
    """What ``--help`` of a script that runs alone prints."""
    lines = [f"usage: {script} [--NAME VALUE ...] [--fresh]", "", "params and their defaults:"]
    leaves = _leaves(defaults)
    width = max((len(name) for name in leaves), default=0)
    lines += [f"  --{name:<{width}}  {json.dumps(value)}" for name, value in leaves.items()]
    return "\n".join([*lines, "", "The same command again goes on where it stopped; --fresh starts anew."])


def refuse_typos(rest: Sequence[str], defaults: Mapping[str, Any]) -> None:
    """Refuses a flag that nobody knows but that looks like a param: with it the default would be trained, silently.

    Args:
        rest: Arguments that are none of ours. What stands behind ``--`` is the script's own.
        defaults: The known params.

    Raises:
        InvalidParamsError: Such a flag, with the name that was probably meant.
    """
    known = [name.replace("_", "-") for name in _leaves(defaults)]
    for word in rest:
        if word == "--":
            return
        flag = word[2:].partition("=")[0].replace("_", "-") if word.startswith("--") else ""
        if close := difflib.get_close_matches(flag, known, n=1, cutoff=0.75) if flag else []:
            raise InvalidParamsError(
                f"there is no param --{flag}",
                hint=f"Did you mean --{close[0]}? Flags of the script itself go behind a lone --.",
            )


def _leaves(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in params.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
    return found


def _parse(flag: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in _BOOLS:
            raise InvalidParamsError(f"--{flag} {text!r} is neither true nor false", hint=f"--{flag} or --no-{flag}.")
        return _BOOLS[text.lower()]
    if isinstance(default, str):
        return text
    if isinstance(default, int | float):
        try:
            return int(text) if isinstance(default, int) else float(text)
        except ValueError:
            kind = "an integer" if isinstance(default, int) else "a number"
            raise InvalidParamsError(f"--{flag} {text!r} is not {kind}", hint=f"Like --{flag} {default}.") from None
    try:
        return loads_strict(text)
    except InvalidParamsError:
        if default is None:
            return text
        raise InvalidParamsError(
            f"--{flag} {text!r} is not JSON", hint=f"Write it like --{flag} '{json.dumps(default)}'."
        ) from None


def _assign(target: dict[str, Any], name: str, value: Any, path: str) -> None:
    head, dot, tail = name.partition(".")
    if name not in target and dot and isinstance(target.get(head), dict):
        _assign(target[head], tail, value, path)
        return
    current = target.get(name)
    if isinstance(current, dict) and isinstance(value, Mapping):
        for key, item in value.items():
            _assign(current, key, item, f"{path}.{key}")
        return
    target[name] = _typed(canonical(value, path), current, path)


def _typed(value: Any, default: Any, path: str) -> Any:
    if default is None or value is None:
        return value
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float) and isinstance(value, int):
        return float(value)
    elif isinstance(default, list | tuple):
        fits = isinstance(value, list)
    else:
        fits = isinstance(value, type(default))
    if not fits:
        kind = type(default).__name__
        raise InvalidParamsError(
            f"param {path} is {value!r}, but its default is {default!r}", hint=f"Give a value of type {kind}."
        )
    return value

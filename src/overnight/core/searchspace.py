"""The compact notation of a search space: ``{log: [1e-5, 1e-2]}``, ``{range: [..]}``, ``{int: [..]}``, or a list."""

import difflib
import json
import re
from typing import Any

from pydantic import ValidationError

from overnight.core.canonical import canonical
from overnight.core.errors import InvalidParamsError
from overnight.core.models.spec import Distribution, Prune
from overnight.core.spectext import Misplaced, Path

KINDS = ("log", "range", "int", "choice")
EXAMPLE = "Write {log: [1e-5, 1e-2]}, {range: [0, 1]}, {int: [1, 8]}, or a list of choices."


def parse_space(raw: dict[str, Any], path: Path) -> tuple[dict[str, Distribution], dict[str, Any]]:
    """Splits the params of a sweep into those to search and those that are fixed (plain scalars).

    Raises:
        Misplaced: A param that is not written as it should be, or nothing to search.
    """
    space: dict[str, Distribution] = {}
    fixed: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, (dict, list)):
            space[name] = parse_distribution(value, (*path, name))
        else:
            fixed[name] = value
    if not space:
        raise Misplaced(path, "nothing to search: every param is a fixed value", EXAMPLE)
    for name, distribution in space.items():
        _check_condition(name, distribution, space, fixed, path)
    return space, fixed


def parse_distribution(raw: dict[str, Any] | list[Any], path: Path) -> Distribution:
    """One param.

    Raises:
        Misplaced: It is not written as it should be.
    """
    if isinstance(raw, list):
        return _build({"kind": "choice", "choices": _choices(raw, path)}, path)
    kinds = [kind for kind in KINDS if kind in raw]
    if len(kinds) != 1:
        raise Misplaced(path, *_wrong_kind(raw, kinds))
    kind = kinds[0]
    for key in raw:
        if key not in (kind, "when", "step") or (key == "step" and kind not in ("range", "int")):
            raise Misplaced((*path, key), f"{key!r} does not go with {kind!r}", EXAMPLE)
    data: dict[str, Any] = {"kind": kind, "when": _condition(raw.get("when"), (*path, "when"))}
    if kind == "choice":
        data["choices"] = _choices(raw[kind], path)
    else:
        data["low"], data["high"] = _bounds(raw[kind], kind, (*path, kind))
        data["step"] = None if raw.get("step") is None else _number(raw["step"], kind, (*path, "step"))
    return _build(data, path)


def _wrong_kind(raw: dict[str, Any], kinds: list[str]) -> tuple[str, str]:
    if kinds:
        return f"{' and '.join(kinds)} cannot go together", EXAMPLE
    name = next(iter(raw), "")
    if any(isinstance(value, dict) for value in raw.values()):
        return "params do not nest here", f"Write the name with a dot, e.g. opt.{name}: {{log: [1e-5, 1e-2]}}."
    close = difflib.get_close_matches(name, [*KINDS, "when", "step"], n=1, cutoff=0.5)
    return f"no scale in {raw!r}"[:200], f"Did you mean {close[0]!r}? {EXAMPLE}" if close else EXAMPLE


def _bounds(raw: Any, kind: str, path: Path) -> tuple[float, float]:
    if not isinstance(raw, list) or len(raw) != 2:
        raise Misplaced(path, f"{kind} takes two numbers, not {raw!r}"[:200], f"Write {kind}: [low, high].")
    return _number(raw[0], kind, (*path, 0)), _number(raw[1], kind, (*path, 1))


def _number(raw: Any, kind: str, path: Path) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        raise Misplaced(path, f"{raw!r} is no number"[:200], "Write numbers without quotes, such as 0.1 or 1e-5.")
    if kind == "int" and not float(raw).is_integer():
        raise Misplaced(path, f"int takes whole numbers, not {raw!r}", "Use range for real numbers.")
    return raw


def _choices(raw: Any, path: Path) -> list[Any]:
    if not isinstance(raw, list) or not raw:
        raise Misplaced(path, "a choice needs a list with at least one value", "Write [adamw, muon].")
    try:
        values = canonical(raw, "choices")
    except InvalidParamsError as error:
        raise Misplaced(path, error.message, error.hint) from None
    assert isinstance(values, list)
    texts = [json.dumps(value, sort_keys=True) for value in values]
    if (twice := next((text for text in texts if texts.count(text) > 1), None)) is not None:
        raise Misplaced(path, f"the choice {twice[:60]} comes twice", "Keep one.")
    return values


_EQUALS = re.compile(r"\s*([\w.\-/]+)\s*==\s*(.+?)\s*")
_WORD = re.compile(r"[^\W\d][\w.-]*")


def _condition(raw: Any, path: Path) -> str | None:
    """The text of a condition; planners know its whole language. A bare word after ``==`` is taken for text."""
    if raw is None:
        return None
    if not isinstance(raw, str) or not raw.strip():
        raise Misplaced(path, f"{raw!r} is no condition"[:200], 'Write: when: opt.name == "muon"')
    match = _EQUALS.fullmatch(raw)
    if match and _WORD.fullmatch(match[2]) and match[2] not in ("true", "false", "null", "True", "False", "None"):
        return f"{match[1]} == {json.dumps(match[2])}"
    return raw.strip()


def _equality(condition: str | None) -> tuple[str, Any] | None:
    """The param and the value of a condition that is a plain ``name == value``; None for any other."""
    match = _EQUALS.fullmatch(condition or "")
    if match is None:
        return None
    text = match[2]
    if len(text) >= 2 and text[0] == text[-1] == "'":
        text = json.dumps(text[1:-1])
    try:
        return match[1], json.loads(text)
    except ValueError:
        return None


def _check_condition(
    name: str, distribution: Distribution, space: dict[str, Distribution], fixed: dict[str, Any], path: Path
) -> None:
    """Finds the common slips early: a param that is not there, a value that never comes, a circle."""
    if (equality := _equality(distribution.when)) is None:
        return
    other, value = equality
    where = (*path, name, "when")
    if other not in space and other not in fixed:
        close = difflib.get_close_matches(other, [*space, *fixed], n=1)
        raise Misplaced(where, f"there is no param {other!r}", f"Did you mean {close[0]!r}?" if close else "")
    if _waits_for(other, name, space):
        raise Misplaced(where, f"{name!r} depends on itself", "Drop one of the conditions.")
    choices = space[other].choices if other in space else ()
    if choices and value not in choices:
        shown = json.dumps(list(choices))[:200]
        raise Misplaced(where, f"{other!r} is never {json.dumps(value)}", f"Its choices: {shown}")


def _waits_for(start: str, goal: str, space: dict[str, Distribution]) -> bool:
    current, seen = start, set[str]()
    while current not in seen:
        if current == goal:
            return True
        seen.add(current)
        equality = _equality(space[current].when) if current in space else None
        current = equality[0] if equality else current
    return False


def _build(data: dict[str, Any], path: Path) -> Distribution:
    try:
        return Distribution.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Misplaced(path, str(first["msg"]).removeprefix("Value error, "), EXAMPLE) from None


def parse_prune(raw: Any, path: Path) -> Prune | None:
    """``asha``, ``median``, or ``{asha: {min_step: 100}}``.

    Raises:
        Misplaced: It is not written as it should be.
    """
    if raw is None:
        return None
    hint = "Write prune: asha, or prune: {asha: {min_step: 100}}."
    kind: Any = raw
    options: Any = None
    if isinstance(raw, dict) and len(raw) == 1:
        kind, options = next(iter(raw.items()))
    if kind not in ("asha", "median"):
        close = difflib.get_close_matches(str(kind), ["asha", "median"], n=1)
        raise Misplaced(path, f"{raw!r} is no pruner"[:200], f"Did you mean {close[0]!r}?" if close else hint)
    if options is not None and not isinstance(options, dict):
        raise Misplaced((*path, kind), f"options of {kind} are a mapping, not {options!r}"[:200], hint)
    try:
        return Prune.model_validate({"kind": kind} | (options or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][-1]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise Misplaced(
                (*path, kind, key), f"{kind} has no option {key!r}", "Known: min_step, reduction."
            ) from None
        raise Misplaced((*path, kind, key), str(first["msg"]), hint) from None

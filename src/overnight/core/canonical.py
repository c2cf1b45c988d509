"""One canonical form of params, so that the same configuration is the same trial whoever proposes it."""

import hashlib
import json
import math
import unicodedata
from typing import Any

from overnight.core.errors import InvalidParamsError

MAX_INT = 2**63 - 1
MAX_DEPTH = 20
MAX_BYTES = 256 * 1024

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def canonical(value: Any, _path: str = "params", _depth: int = 0) -> Json:
    """The canonical form of a JSON-like value.

    Keys become NFC-normalised text, tuples become lists, integral floats below 2**53 become ints (so that ``1`` and
    ``1.0`` are one configuration), ``-0.0`` becomes ``0``. Strings keep their bytes: only keys are normalised.

    Raises:
        InvalidParamsError: NaN, infinity, an integer beyond 64 bits, a key that is no string or comes twice after
            normalisation, nesting deeper than 20, or a type that JSON does not have. The message names the path.
    """
    if _depth > MAX_DEPTH:
        raise InvalidParamsError(f"{_path[:200]} is nested deeper than {MAX_DEPTH} levels", hint="Put it in a file.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, _path)
    if isinstance(value, int):
        if abs(value) > MAX_INT:
            raise InvalidParamsError(f"{_path} is an integer beyond 64 bits", hint="Pass it as a string.")
        return int(value)
    if isinstance(value, float):
        return _number(value, _path)
    if isinstance(value, (list, tuple)):
        return [canonical(v, f"{_path}[{i}]", _depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return _mapping(value, _path, _depth)
    raise InvalidParamsError(
        f"{_path} is a {type(value).__name__}, which JSON does not have",
        hint="Use null, true/false, numbers, strings, lists and mappings.",
    )


def _text(value: str, path: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidParamsError(
            f"{path} has text that is not valid Unicode (a lone surrogate)", hint="Pass bytes as base64 or hex."
        ) from None
    return value


def _number(value: float, path: str) -> int | float:
    if not math.isfinite(value):
        raise InvalidParamsError(f"{path} is {value}, not a finite number", hint="Use null, or leave the param out.")
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(value)


def _mapping(value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidParamsError(f"{path} has the key {key!r}, which is no string", hint=f'Write it as "{key}".')
        name = unicodedata.normalize("NFC", _text(key, path))
        if name in result:
            raise InvalidParamsError(
                f"{path} has the key {name!r} twice (after Unicode normalisation)", hint="Keep one of the two."
            )
        result[name] = canonical(item, f"{path}.{name}", depth + 1)
    return result


def canonical_json(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces, UTF-8.

    Raises:
        InvalidParamsError: See :func:`canonical`; also when the text is longer than 256 KiB.
    """
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if len(text.encode()) > MAX_BYTES:
        raise InvalidParamsError(f"params are larger than {MAX_BYTES // 1024} KiB", hint="Put them in a file.")
    return text


def digest(value: Any) -> str:
    """A hash of the canonical form: the first 32 hex digits of SHA-256."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def loads_strict(text: str | bytes, example: str = '{"lr": 0.001}') -> Any:
    """``json.loads`` that refuses a key twice, NaN and infinity instead of quietly choosing.

    Args:
        text: JSON.
        example: What the hint shows of how it should look.

    Raises:
        InvalidParamsError: The text is not JSON, or one of the above; the message says where.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in items:
            if key in result:
                raise InvalidParamsError(f"the key {key!r} comes twice", hint="Keep one of the two.")
            result[key] = item
        return result

    def constant(name: str) -> Any:
        raise InvalidParamsError(f"{name} is not a finite number", hint="Use null, or leave the param out.")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        shown = text[:80] if isinstance(text, str) else text[:80].decode(errors="replace")
        raise InvalidParamsError(
            f"not JSON: {error}: {shown!r}",
            hint=f"Write it like {example}: names and text in double quotes, no comma behind the last.",
        ) from None

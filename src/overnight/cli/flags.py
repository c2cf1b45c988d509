"""From the words behind a script to its params: ``--lr 3e-4 --tiny`` becomes ``{"lr": 0.0003, "tiny": True}``."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from overnight.core.canonical import canonical, loads_strict
from overnight.core.enums import ArgsStyle
from overnight.core.errors import InvalidParamsError

_NUMBER = re.compile(r"-(\d|\.\d|Infinity).*")
_JSON_LIKE = re.compile(r"\s*([\[{\"]|-?\d|(true|false|null|NaN|-?Infinity)\s*$)")


@dataclass(frozen=True)
class Words:
    """What the words behind a script mean.

    Attributes:
        argv: Words for the script as they are: those before the first flag, and those behind ``--``.
        params: The flags.
    """

    argv: tuple[str, ...]
    params: dict[str, Any]


def parse_value(text: str) -> Any:
    """A param's value: JSON where it is JSON (``3e-4``, ``true``, ``[1,2]``), else text.

    Raises:
        InvalidParamsError: NaN, infinity, an integer beyond 64 bits: JSON that has no canonical form.
    """
    if not _JSON_LIKE.match(text):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return canonical(loads_strict(text), "the value")


def parse_words(words: Sequence[str], style: ArgsStyle, reserved: Iterable[str] = ()) -> Words:
    """Splits words into params and plain arguments.

    Args:
        words: Everything behind the script.
        style: With ``hydra`` params are written ``name=value``.
        reserved: Option names of the command itself, which somebody put behind the script by mistake.

    Raises:
        InvalidParamsError: A flag twice, a word that belongs to nothing, a value without a canonical form.
    """
    mine, _, verbatim = _split(words)
    argv: list[str] = []
    params: dict[str, Any] = {}
    pending = list(mine)
    while pending:
        word = pending.pop(0)
        if style is ArgsStyle.HYDRA and "=" in word and not word.startswith("-"):
            name, _, text = word.partition("=")
        elif word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            _refuse_reserved(name, reserved)
            text = text if equals else _value_of(name, pending)
        elif params or word.startswith("-"):
            raise _stray(word, params)
        else:
            argv.append(word)
            continue
        if not name or name in params:
            message = f"the param {name!r} is given twice" if name else f"{word!r} names no param"
            raise InvalidParamsError(message, hint="Write each param once, like --lr 3e-4.")
        params[name] = _named_value(name, text)
    return Words((*argv, *verbatim), params)


def _split(words: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    if "--" not in words:
        return words, "", ()
    at = list(words).index("--")
    return words[:at], "--", words[at + 1 :]


def _value_of(name: str, pending: list[str]) -> str:
    """The next word, or ``true`` for a flag that stands alone."""
    if pending and (not pending[0].startswith("-") or _NUMBER.fullmatch(pending[0])):
        return pending.pop(0)
    return "true"


def _named_value(name: str, text: str) -> Any:
    try:
        return parse_value(text)
    except InvalidParamsError as error:
        raise InvalidParamsError(f"param {name}: {error.message}", hint=error.hint) from None


def _refuse_reserved(name: str, reserved: Iterable[str]) -> None:
    if f"--{name}" in reserved:
        raise InvalidParamsError(
            f"--{name} stands behind the script, where everything is a param of the script",
            hint=f"Put --{name} before the script; or, if the script has such a param, write -p {name}=VALUE there.",
        )


def _stray(word: str, params: dict[str, Any]) -> InvalidParamsError:
    if word.startswith("-"):
        return InvalidParamsError(f"{word!r} is no param", hint="Params are --name value; other words go behind --.")
    last, value = list(params.items())[-1]
    return InvalidParamsError(
        f"{word!r} behind --{last} belongs to nothing",
        hint=f"Write a list as --{last} '{json.dumps([value, parse_value(word)])}', or put plain words behind --.",
    )


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Params from ``name=value`` words.

    Raises:
        InvalidParamsError: No ``=``, a name twice, a value without a canonical form.
    """
    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidParamsError(f"{pair!r} is not name=value", hint="Write it like -p lr=3e-4.")
        if name in params:
            raise InvalidParamsError(f"the param {name!r} is given twice", hint="Keep one of the two.")
        params[name] = _named_value(name, text)
    return params


def parse_object(text: str | None) -> dict[str, Any]:
    """Params from JSON text.

    Raises:
        InvalidParamsError: Not a JSON object, a key twice, NaN.
    """
    if text is None:
        return {}
    value = loads_strict(text)
    if not isinstance(value, dict):
        raise InvalidParamsError(f"--params is a {type(value).__name__}", hint="""Write it like '{"lr": 0.001}'.""")
    result = canonical(value)
    assert isinstance(result, dict)
    return result

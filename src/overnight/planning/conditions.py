"""The tiny language of ``when``: a spec file must be able to say when a param exists, and must not be able to run code.

Grammar, loosest binding first::

    or:         and ("or" and)*
    and:        not ("and" not)*
    not:        "not" not | "(" or ")" | comparison
    comparison: NAME ("==" | "!=" | "<" | "<=" | ">" | ">=") literal
              | NAME ["not"] "in" "[" literal ("," literal)* "]"
    literal:    number | "text" | 'text' | true | false | null    (also True, False, None)

A comparison about a param that is absent is false, whatever its operator.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overnight.core.canonical import canonical
from overnight.core.errors import InvalidSpecError

MAX_LENGTH = 2_000
MAX_DEPTH = 50

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<op>==|!=|<=|>=|<|>|\(|\)|\[|\]|,)
    | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])
    | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<word>[^\W\d][\w.-]*)
    )""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_KEYWORDS = frozenset({"and", "or", "not", "in", *_CONSTANTS})
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})


class Condition:
    """A parsed ``when``."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true of these values, by dotted param name; a missing name is an absent param."""
        raise TypeError(f"{type(self).__name__} is no condition")  # pragma: no cover - every subclass defines it

    def names(self) -> frozenset[str]:
        """The params that it reads."""
        raise TypeError(f"{type(self).__name__} is no condition")  # pragma: no cover - every subclass defines it


@dataclass(frozen=True)
class Compare(Condition):
    """``name operator literal``; ``in`` has a tuple of literals."""

    name: str
    operator: str
    literal: Any

    def holds(self, values: Mapping[str, Any]) -> bool:
        """False for an absent param and for an order between things that have none (text and number)."""
        if self.name not in values:
            return False
        value = canonical(values[self.name])
        match self.operator:
            case "==":
                return _same(value, self.literal)
            case "!=":
                return not _same(value, self.literal)
            case "in":
                return any(_same(value, item) for item in self.literal)
            case "not in":
                return not any(_same(value, item) for item in self.literal)
        return _ordered(value, self.operator, self.literal)

    def names(self) -> frozenset[str]:
        """The one name."""
        return frozenset({self.name})


@dataclass(frozen=True)
class Not(Condition):
    """The opposite."""

    inner: Condition

    def holds(self, values: Mapping[str, Any]) -> bool:
        """True when the inner condition is not."""
        return not self.inner.holds(values)

    def names(self) -> frozenset[str]:
        """Those of the inner condition."""
        return self.inner.names()


@dataclass(frozen=True)
class Junction(Condition):
    """``and`` or ``or`` of two or more."""

    every: bool
    parts: tuple[Condition, ...]

    def holds(self, values: Mapping[str, Any]) -> bool:
        """All of them, or any."""
        return (all if self.every else any)(part.holds(values) for part in self.parts)

    def names(self) -> frozenset[str]:
        """Those of all parts."""
        return frozenset().union(*(part.names() for part in self.parts))


def _same(left: Any, right: Any) -> bool:
    # True == 1 in Python; in a spec file they are different values.
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _ordered(value: Any, operator: str, literal: Any) -> bool:
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (value, literal))
    if not numbers and not (isinstance(value, str) and isinstance(literal, str)):
        return False
    order: dict[str, bool] = {
        "<": value < literal,
        "<=": value <= literal,
        ">": value > literal,
        ">=": value >= literal,
    }
    return order[operator]


def parse(text: str) -> Condition:
    """The condition that ``text`` means.

    Raises:
        InvalidSpecError: It is not in the grammar; the message says where it stops making sense.
    """
    if len(text) > MAX_LENGTH:
        raise InvalidSpecError(f"a 'when' of {len(text)} characters is too long (at most {MAX_LENGTH})")
    parser = _Parser(text)
    condition = parser.either(0)
    parser.end()
    return condition


class _Parser:
    """Recursive descent over the tokens of one ``when``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokens(text)
        self.at = 0

    def _tokens(self, text: str) -> list[tuple[str, str, int]]:
        tokens: list[tuple[str, str, int]] = []
        position = 0
        stripped = text.rstrip()
        while position < len(stripped):
            match = _TOKEN.match(stripped, position)
            if match is None:
                raise self.error(position)
            kind = str(match.lastgroup)
            tokens.append((kind, match[kind], match.start(kind)))
            position = match.end()
        return tokens

    def error(self, position: int | None = None) -> InvalidSpecError:
        if position is None:
            position = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)
        return InvalidSpecError(
            f"cannot read the condition {self.text[:200]!r} at character {position + 1}",
            hint='Write it like: opt.name == "muon" and depth in [12, 24]; with == != < <= > >= in, and, or, not.',
        )

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at][:2] if self.at < len(self.tokens) else ("end", "")

    def take(self, kind: str, text: str) -> bool:
        if self.peek() != (kind, text):
            return False
        self.at += 1
        return True

    def need(self, kind: str, text: str) -> None:
        if not self.take(kind, text):
            raise self.error()

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.error()

    def either(self, depth: int) -> Condition:
        parts = [self.both(depth)]
        while self.take("word", "or"):
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else Junction(False, tuple(parts))

    def both(self, depth: int) -> Condition:
        parts = [self.negation(depth)]
        while self.take("word", "and"):
            parts.append(self.negation(depth))
        return parts[0] if len(parts) == 1 else Junction(True, tuple(parts))

    def negation(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise InvalidSpecError(f"a 'when' is nested deeper than {MAX_DEPTH} levels")
        if self.take("word", "not"):
            return Not(self.negation(depth + 1))
        if self.take("op", "("):
            inner = self.either(depth + 1)
            self.need("op", ")")
            return inner
        return self.comparison()

    def comparison(self) -> Condition:
        kind, name = self.peek()
        if kind != "word" or name in _KEYWORDS:
            raise self.error()
        self.at += 1
        kind, operator = self.peek()
        if kind == "op" and operator in _COMPARISONS:
            self.at += 1
            return Compare(name, operator, self.literal())
        negated = self.take("word", "not")
        self.need("word", "in")
        return Compare(name, "not in" if negated else "in", self.choices())

    def choices(self) -> tuple[Any, ...]:
        self.need("op", "[")
        items = [self.literal()]
        while self.take("op", ","):
            items.append(self.literal())
        self.need("op", "]")
        return tuple(items)

    def literal(self) -> Any:
        kind, text = self.peek()
        value: Any
        if kind == "number":
            value = canonical(float(text) if re.search(r"[.eE]", text) else int(text))
        elif kind == "text":
            value = self._unquote(text)
        elif kind == "word" and text in _CONSTANTS:
            value = _CONSTANTS[text]
        else:
            raise self.error()
        self.at += 1
        return value

    def _unquote(self, text: str) -> str:
        if text[0] == "'":
            text = '"' + text[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        try:
            return str(json.loads(text))
        except ValueError:
            raise self.error() from None

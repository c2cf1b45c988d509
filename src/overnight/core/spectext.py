"""From the text of a YAML or TOML file to plain values, with the line of every key, safe against hostile text.

YAML is read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): ``1e-5`` is a number, ``on``
and ``08:00`` are text. A key twice, a tag, a merge key, a recursive or exploding alias is an error, never a surprise.
"""

import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

import yaml

from overnight.core.canonical import loads_strict
from overnight.core.errors import InvalidParamsError, InvalidSpecError

MAX_CHARACTERS = 1024 * 1024
MAX_VALUES = 100_000
MAX_DEPTH = 50
MAX_DIGITS = 400
_JSON_EXAMPLE = '{"experiment": "digits", "script": "train.py"}'
_TOML_HINT = 'TOML has lines such as experiment = "digits": text stands in double quotes.'
_SCHEMA_HINT = "`overnight submit --schema` prints what a spec may hold."

Path = tuple[str | int, ...]


class Misplaced(ValueError):
    """Something wrong at a path of a document; the caller knows the document and so the line."""

    def __init__(self, path: Path, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.path, self.message, self.hint = path, message, hint


@dataclass(frozen=True)
class Document:
    """A parsed file.

    Attributes:
        data: The mapping that it holds.
        places: ``file:line`` of each key and item, by path; empty for TOML, which keeps no lines.
        name: The file's name, for messages.
    """

    data: dict[str, Any]
    name: str
    places: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where a path stands: its own line, else that of the nearest parent, else the file."""
        for end in range(len(path), 0, -1):
            if (found := self.places.get(path[:end])) is not None:
                return found
        return self.name


def parse(text: str, name: str) -> Document:
    """Reads a file by its suffix: ``.toml``, ``.json``, or YAML for anything else.

    Raises:
        InvalidSpecError: It does not parse or does not hold a mapping; the message gives ``file:line``.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidSpecError(f"{name} is larger than {MAX_CHARACTERS // 1024} KiB", hint="Put data in other files.")
    if name.lower().endswith(".toml"):
        return _parse_toml(text, name)
    if name.lower().endswith(".json"):
        return _parse_json(text, name)
    try:
        node = yaml.compose(text, Loader=_Loader)
        builder = _Builder(name)
        data = {} if node is None else builder.value(node, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise InvalidSpecError(f"{place}: not YAML: {error.problem or error.context}", hint=_yaml_hint(error)) from None
    except yaml.YAMLError as error:
        raise InvalidSpecError(f"{name}: not YAML: {str(error).splitlines()[0]}", hint=_SCHEMA_HINT) from None
    except RecursionError:
        raise InvalidSpecError(f"{name} is nested deeper than {MAX_DEPTH} levels", hint=_SCHEMA_HINT) from None
    if not isinstance(data, dict):
        raise InvalidSpecError(f"{name} holds no mapping", hint="Write lines such as 'experiment: digits'.")
    return Document(data, name, builder.places)


def _yaml_hint(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem)
    if "'\\t'" in problem:
        return "Indent with spaces, not tabs."
    if "mapping values are not allowed" in problem:
        return "Put text that holds ': ' in quotes, and check the indentation."
    return ""


def _parse_json(text: str, name: str) -> Document:
    """YAML readers see escaped surrogate pairs as two characters, so JSON is read as JSON."""
    try:
        data = loads_strict(text, example=_JSON_EXAMPLE)
    except InvalidParamsError as error:
        raise InvalidSpecError(f"{name}: {error.message}", hint=error.hint) from None
    if not isinstance(data, dict):
        raise InvalidSpecError(f"{name} holds no object", hint=f"Write it like {_JSON_EXAMPLE}.")
    return Document(data, name)


def _parse_toml(text: str, name: str) -> Document:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"line (\d+)", str(error))
        place = f"{name}{':' + match[1] if match else ''}"
        raise InvalidSpecError(f"{place}: not TOML: {error}", hint=_TOML_HINT) from None
    except (ValueError, RecursionError) as error:
        raise InvalidSpecError(f"{name}: not TOML: {error}", hint=_TOML_HINT) from None
    _refuse_dates(data, name, "")
    return Document(data, name)


def _refuse_dates(value: Any, name: str, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_dates(item, name, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_dates(item, name, f"{path}[{index}]")
    elif not isinstance(value, (str, int, float, bool)):
        raise InvalidSpecError(f"{name}: {path} is a {type(value).__name__}", hint=f'Quote it: "{value}".')


class _Loader(yaml.SafeLoader):
    """Composes nodes only; plain scalars are resolved here, since PyYAML follows YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_PLAIN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan"),
    ".inf": float("inf"), ".Inf": float("inf"), ".INF": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"),
}  # fmt: skip


def _scalar(text: str) -> Any:
    if text in _SPECIAL:
        return _SPECIAL[text]
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", text):
        return int(text, 0)
    return float(text) if _NUMBER.fullmatch(text) else text


class _Builder:
    """Turns nodes into values and notes where each stands."""

    def __init__(self, name: str) -> None:
        self.places: dict[Path, str] = {}
        self._name = name
        self._num_values = 0
        self._open: set[int] = set()

    def _error(self, node: yaml.Node, message: str, hint: str = "") -> InvalidSpecError:
        return InvalidSpecError(f"{self._name}:{node.start_mark.line + 1}: {message}", hint=hint)

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        """The value of a node."""
        self._num_values += 1
        self.places.setdefault(path, f"{self._name}:{node.start_mark.line + 1}")
        if self._num_values > MAX_VALUES:
            raise self._error(node, f"more than {MAX_VALUES:,} values, counting aliases", "Write fewer.")
        if depth > MAX_DEPTH:
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        if node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"the tag {node.tag!r} is not allowed", "Leave it out: values have plain types.")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise self._error(node, "an alias that holds itself")
        self._open.add(id(node))
        try:
            return (
                self._mapping(node, path, depth)
                if isinstance(node, yaml.MappingNode)
                else self._list(node, path, depth)
            )
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.style is not None:
            return text
        if len(text) > MAX_DIGITS and text.lstrip("+-").isdigit():
            raise self._error(node, f"a number with {len(text)} digits", "Quote it if it is text.")
        return _scalar(text)

    def _list(self, node: yaml.Node, path: Path, depth: int) -> list[Any]:
        return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, item in node.value:
            key = self.value(key_node, (*path, "?"), depth + 1) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self._error(key_node, f"the key {key!r} is no text", f'Quote it: "{key_node.value}".')
            if key == "<<":
                raise self._error(key_node, "merge keys ('<<') are not read", "Use 'extends: other.yaml'.")
            if key in result:
                raise self._error(key_node, f"the key {key!r} comes twice (first on line {lines[key]})", "Keep one.")
            lines[key] = key_node.start_mark.line + 1
            self.places[(*path, key)] = f"{self._name}:{lines[key]}"
            result[key] = self.value(item, (*path, key), depth + 1)
        return result

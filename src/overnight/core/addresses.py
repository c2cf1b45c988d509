"""Addresses as people and logs may see them: the password of a store belongs into neither, nor into a database.

What is no secret stays as it was typed, letter by letter, so that an address without one is its own name.
"""

import re
from typing import Any

_USER = re.compile(r"(?<=://)([^/@:]*):([^/]*)@")
_TORN_USER = re.compile(r"(?<=://)([^/@:]*):(?!\d+(?:[/?#]|$))(.*)@")
"""A password with a slash in it, which no driver takes, but which would stand in the message that says so. One that is
a number up to a slash is not told from a port."""

_FIELD = re.compile(r"(?<=[?&;])([^=&;#]*)=([^&;#]+)")
_SECRET_NAME = re.compile(r"pass|pwd|secret|key|token|cred|sig|sas|auth", re.IGNORECASE)
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`\\]+")
"""Up to the quotes or the space behind it."""

HIDDEN = "***"


def shown(url: str) -> str:
    """A URL without passwords and keys; a path as it is.

    Args:
        url: Such as ``scheme://user:secret@host/path?password=secret``, which becomes
            ``scheme://user:***@host/path?password=***``.
    """
    if "://" not in url:
        return url
    for pattern in (_USER, _TORN_USER):
        url = pattern.sub(rf"\1:{HIDDEN}@", url)
    return _FIELD.sub(_without_secret, url)


def discreet(text: str) -> str:
    """A text, such as the message of an error, with every URL in it as :func:`shown` has it."""
    return _IN_TEXT.sub(lambda match: shown(match[0]), text) if "://" in text else text


def discreet_json(value: Any) -> Any:
    """What JSON can hold, with every text in it as :func:`discreet` has it."""
    match value:
        case str():
            return discreet(value)
        case dict():
            return {key: discreet_json(one) for key, one in value.items()}
        case list() | tuple():
            return [discreet_json(one) for one in value]
    return value


def is_secret(name: str) -> bool:
    """Whether a field of this name holds what nobody may see."""
    return _SECRET_NAME.search(name) is not None


def _without_secret(field: re.Match[str]) -> str:
    return f"{field[1]}={HIDDEN}" if is_secret(field[1]) else field[0]

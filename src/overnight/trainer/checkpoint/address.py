"""Addresses of places as people and logs may see them: a store's password belongs into neither.

What is no secret stays as it was typed, letter by letter, so that an address without one is its own name.
"""

import re

_USER = re.compile(r"(?<=://)([^/@:]*):([^/]*)@")
_TORN_USER = re.compile(r"(?<=://)([^/@:]*):(?!\d+(?:[/?#]|$))(.*)@")
"""A password with a slash in it, which no driver takes, but which would stand in the message that says so. One that is
a number up to a slash is not told from a port."""

_FIELD = re.compile(r"(?<=[?&;])([^=&;#]*)=([^&;#]+)")
_SECRET_NAME = re.compile(r"pass|pwd|secret|key|token|cred|sig|sas|auth", re.IGNORECASE)


def shown(url: str) -> str:
    """A URL without passwords and keys; a path as it is.

    Args:
        url: Such as ``scheme://user:secret@host/path?password=secret``, which becomes
            ``scheme://user:***@host/path?password=***``.
    """
    if "://" not in url:
        return url
    for pattern in (_USER, _TORN_USER):
        url = pattern.sub(r"\1:***@", url)
    return _FIELD.sub(_without_secret, url)


def _without_secret(field: re.Match[str]) -> str:
    return f"{field[1]}=***" if _SECRET_NAME.search(field[1]) else field[0]

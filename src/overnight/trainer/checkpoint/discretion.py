"""Errors of a store's driver without the passwords that it was given.

Drivers put into their messages what they were called with: URLs with a password, endpoints from the environment, signed
requests. Such an error goes far: into the message of ours that it causes, the traceback on a terminal, logs, the
database, MLflow. So it is replaced where it comes from, by one that says the same without the secret.
"""

import base64
import builtins
import os
import re
import traceback
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from overnight.core.addresses import HIDDEN, discreet, is_secret

_SHORTEST = 4
"""Characters. What is shorter is hidden in URLs only: it would be found in half of all words."""

_USER = re.compile(r"//([^/@:]*):(.*)@", re.DOTALL)
_NO_SECRET = re.compile(r"(?:id|file|filename|path|sock|dir)$", re.IGNORECASE)
_OF_STORES = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_")


class Discretion:
    """Knows what must not be told of a store.

    Args:
        url: Of the place.
        options: With which its driver was made.
        environ: Whence drivers take endpoints, proxies and keys.
    """

    def __init__(self, url: str, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        found = {*_in_url(url), *_in_options(options), *_in_environment(environ)}
        forms = {form for secret in found for form in _forms(secret) if len(form) >= _SHORTEST}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def hide(self, text: str) -> str:
        """A text without the secrets."""
        text = discreet(text)
        return self._known.sub(HIDDEN, text) if self._known is not None else text

    def about(self, error: Exception) -> Exception:
        """The error as anybody may see it: itself if neither it nor what caused it tells a secret.

        Otherwise one of the built-in class that it is of, with its number, its text without the secret, and no cause.
        """
        told = "".join(traceback.TracebackException.from_exception(error, limit=0).format()) + repr(error)
        if self.hide(told) == told:
            return error
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == builtins.__name__)
        text = self.hide(str(error))
        text = text if type(error) is kind else f"{type(error).__name__}: {text}"
        number = getattr(error, "errno", None)
        if issubclass(kind, OSError) and isinstance(number, int):
            return kind(number, self.hide(error.strerror or text) if isinstance(error, OSError) else text)
        try:
            return kind(text)  # type: ignore[no-any-return]
        except TypeError:  # a few want more than a text
            return Exception(text)


def _in_url(url: str) -> list[str]:
    """Passwords before the host, and those in the query."""
    fields = (field.partition("=") for field in re.split(r"[?&;#]", url)[1:])
    secrets = [value for name, _, value in fields if is_secret(name)]
    for user, password in _USER.findall(url):
        plain = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
        secrets += [password, base64.b64encode(plain.encode()).decode()]  # as HTTP sends it
    return secrets


def _in_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _in_options(value)
        elif isinstance(value, str):
            yield from [value] if _names_a_secret(str(name)) else _in_url(value)


def _in_environment(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if name.startswith(_OF_STORES) and _names_a_secret(name):
            yield value
        elif "://" in value:
            yield from _in_url(value)


def _names_a_secret(name: str) -> bool:
    return is_secret(name) and _NO_SECRET.search(name) is None


def _forms(secret: str) -> Iterable[str]:
    """A secret as it was typed, as it is meant, and as URLs and representations have it."""
    plain = urllib.parse.unquote(secret)
    quoted = (urllib.parse.quote(plain, safe=safe) for safe in ("", "/", "!$&'()*+,;=:@/"))
    return {secret, plain, *quoted, repr(plain)[1:-1]}

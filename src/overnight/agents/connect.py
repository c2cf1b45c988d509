"""Finding the server, so that nobody types an address.

``server.json`` in the home says where the server listens and which process it is. A pid alone is never trusted: the
start time and the boot must fit too, or the file is what a dead server left behind.
"""

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from overnight.core.errors import BadTokenFileError, InvalidSpecError, ServerAwayError
from overnight.core.settings import Settings

START_HINT = "Start one: overnight up -d"
ELSEWHERE_HINT = "Is it running there? The address comes from --server or OVERNIGHT_SERVER."


@dataclass(frozen=True)
class Address:
    """Where to send requests and with what right."""

    url: str
    token: str | None = field(default=None, repr=False)


def find_server(settings: Settings) -> Address:
    """The address of the server that these settings mean: ``settings.server``, else the one of the home.

    Raises:
        ServerAwayError: No server runs for the home.
        InvalidSpecError: ``settings.server`` is no URL, or ``settings.token`` no token.
        BadTokenFileError: The token file is there but of no use.
    """
    if settings.server:
        return Address(_checked_url(settings.server), _token(settings))
    identity = read_identity(settings.paths.server_file)
    if identity is None or not is_alive(identity):
        raise ServerAwayError(f"no server is running for {settings.home}", hint=START_HINT)
    url = str(identity.get("url", "")).rstrip("/")
    if not url:
        raise ServerAwayError(f"{settings.paths.server_file} names no address", hint="Restart it: overnight up -d")
    return Address(url, _token(settings))


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidSpecError(f"server {text!r} is no address", hint="Write it like http://127.0.0.1:8000")
    return text.rstrip("/")


def _token(settings: Settings) -> str | None:
    if settings.token is None:
        return read_token(settings.paths.token_file)
    if not _is_token(settings.token):
        raise InvalidSpecError("the token is not one line of printable ASCII", hint="Look at OVERNIGHT_TOKEN.")
    return settings.token


def _is_token(text: str) -> bool:
    return bool(text) and len(text) <= 4096 and text.isascii() and text.isprintable() and " " not in text


def is_supervised(settings: Settings) -> bool:
    """Whether an ``overnight up`` looks after the server that is meant, so that it will be back soon."""
    if settings.server:
        return False
    identity = read_identity(settings.paths.up_lock)
    return identity is not None and is_alive(identity)


def read_identity(path: Path) -> dict[str, Any] | None:
    """The JSON object in a lock or address file, None if there is none (yet)."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def is_alive(identity: dict[str, Any]) -> bool:
    """Whether the process of ``{"pid", "start", "boot"}`` is still the same one and no zombie."""
    pid = identity.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    if fields[0] in ("Z", "X"):
        return False
    start, boot = identity.get("start"), identity.get("boot")
    return start in (None, int(fields[19]), fields[19]) and boot in (None, "", _boot_id())


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_token(path: Path) -> str | None:
    """The bearer token of a token file; None if there is no file.

    Raises:
        BadTokenFileError: It cannot be read, is open to other users, or does not hold one line of printable ASCII.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadTokenFileError(f"the token file {path} cannot be read: {error}", hint=_NEW_TOKEN) from None
    if stat.S_IMODE(mode) & 0o077:
        raise BadTokenFileError(f"the token file {path} is open to other users", hint=f"Close it: chmod 600 {path}")
    if not _is_token(text):
        raise BadTokenFileError(f"the token file {path} does not hold a token", hint=_NEW_TOKEN)
    return text


_NEW_TOKEN = "Move it away and start the server again (overnight down; overnight up -d): it writes a new one."

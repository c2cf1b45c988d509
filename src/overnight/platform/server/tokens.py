"""Who may call: the home's token file and what a token may do."""

import hmac
import ipaddress
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from overnight.core.enums import Role
from overnight.core.errors import BadTokenFileError, ForbiddenError, SetupError, UnauthorizedError

TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43,200}")

RIGHTS: dict[Role, frozenset[Role]] = {
    Role.OPERATOR: frozenset(Role),
    Role.AGENT: frozenset({Role.AGENT, Role.VIEWER}),
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.NODE: frozenset({Role.NODE}),
}
"""What each role of a token includes. A route asks for one right, named by the least role that has it."""


@dataclass(frozen=True)
class Principal:
    """An authenticated caller.

    Attributes:
        name: What events call it.
        role: What it may do.
    """

    name: str
    role: Role

    def require(self, right: Role) -> None:
        """Refuses the call unless the role includes the right.

        Raises:
            ForbiddenError: It does not.
        """
        if right not in RIGHTS[self.role]:
            raise ForbiddenError(
                f"this token's role is {self.role.value}, the call needs {right.value}",
                hint="Use a token with that role.",
            )


class TokenBook:
    """The tokens that this server knows.

    Args:
        operator: The home's own token.
    """

    def __init__(self, operator: str) -> None:
        self._known = [(operator.encode(), Principal("operator", Role.OPERATOR))]

    def identify(self, header: bytes | None) -> Principal:
        """The caller behind an ``Authorization`` header.

        Raises:
            UnauthorizedError: No bearer token, or one that is not known.
        """
        scheme, _, token = (header or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise UnauthorizedError(
                "the call has no bearer token",
                hint="Send 'Authorization: Bearer TOKEN'; `overnight token` says where the token is.",
            )
        for known, principal in self._known:
            if hmac.compare_digest(known, token.strip()):
                return principal
        raise UnauthorizedError(
            "the token is not the one that this server started with",
            hint="`overnight token` says where that is; OVERNIGHT_TOKEN counts before it. If the file is newer: "
            "overnight down; overnight up -d",
        )


def ensure_token(path: Path) -> str:
    """The token in the file, made (256 bits, mode 0600) if there is no file yet.

    Raises:
        BadTokenFileError: See :func:`read_token`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
                file.flush()
                os.fsync(fd)
            os.link(name, path)
        except FileExistsError:
            pass  # another process was first: its token counts
        finally:
            Path(name).unlink(missing_ok=True)
    return read_token(path)


def read_token(path: Path) -> str:
    """The token in the file.

    Raises:
        BadTokenFileError: Missing, unreadable, open to other users, empty, or not a token; the hint is the way out.
    """
    remake = f"Remove it, then restart overnight to get a new one: rm {path}"
    try:
        mode = path.stat().st_mode
        text = path.read_bytes().decode("ascii", errors="replace").strip()
    except OSError as error:
        raise BadTokenFileError(f"the token file {path} cannot be read: {error.strerror}", hint=remake) from None
    if mode & 0o077:
        raise BadTokenFileError(
            f"the token file {path} is open to other users (mode {mode & 0o777:04o})",
            hint=f"Close it: chmod 600 {path}. If others may have read it, remove it instead and restart overnight.",
        )
    if not text:
        raise BadTokenFileError(f"the token file {path} is empty", hint=remake)
    if not _TOKEN.fullmatch(text):
        raise BadTokenFileError(f"the token file {path} does not hold a token ({len(text)} characters)", hint=remake)
    return text


def is_loopback(host: str) -> bool:
    """Whether binding to ``host`` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, tokens: TokenBook | None) -> None:
    """Refuses to be reachable from other machines without tokens.

    Raises:
        SetupError: ``host`` is not a loopback address and there are no tokens.
    """
    if tokens is None and not is_loopback(host):
        raise SetupError(
            f"refusing to listen on {host}, which other machines can reach, without tokens",
            hint="Listen on 127.0.0.1, or make a token file first.",
        )

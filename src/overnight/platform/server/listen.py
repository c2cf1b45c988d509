"""The listening socket, and the file that says where it is."""

import errno
import json
import socket
from pathlib import Path

from overnight.core.errors import PortTakenError, SetupError
from overnight.core.settings import Settings
from overnight.platform.identity import Holder, write_atomic

BACKLOG = 2048


def open_socket(settings: Settings) -> socket.socket:
    """Binds and listens. Port 0 takes the one of the server before, so that its URL survives a restart, or any.

    Raises:
        PortTakenError: Another program has the port.
        SetupError: The address is not this machine's, or the port is not allowed.
    """
    if settings.port == 0 and (before := _last_port(settings.paths.server_file, settings.host)):
        try:
            return _bind(settings.host, before)
        except (PortTakenError, SetupError):
            pass
    return _bind(settings.host, settings.port)


def _bind(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} of {host} is in use by another program",
                hint="Stop that program, or choose another port: --port 0 takes any free one.",
                port=port,
            ) from None
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="Try --host 127.0.0.1 --port 0."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL for clients on this machine (or, beyond loopback, for others)."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(path: Path, identity: Holder) -> None:
    """Writes ``server.json``: from now on clients, nodes and supervisors find this server."""
    write_atomic(path, identity.to_json())


def _last_port(path: Path, host: str) -> int | None:
    try:
        url = str(json.loads(path.read_text())["url"])
        name, _, port = url.removeprefix("http://").rpartition(":")
        return int(port) if name.strip("[]") == host.strip("[]") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

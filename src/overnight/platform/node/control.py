"""The daemon's control socket: one JSON line in, one out. Only this user's processes reach it."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overnight.core.errors import SetupError
from overnight.core.paths import Home

Op = Callable[[dict[str, Any]], dict[str, Any]]


def make_socket_dir(folder: Path) -> None:
    """Makes the folder for sockets, of this user alone.

    Raises:
        SetupError: Somebody else has made it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SetupError(f"{folder} belongs to another user", hint="Remove it, or use another OVERNIGHT_HOME.")
    folder.chmod(0o700)


class ControlSocket:
    """Answers operations on ``node.sock``.

    Args:
        home: Layout of the home.
        ops: Handlers by name.
    """

    def __init__(self, home: Home, ops: Mapping[str, Op]) -> None:
        self._path = home.node_socket
        self._ops = ops
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens. The caller holds ``node.lock``, so a socket file that is there is a dead daemon's."""
        make_socket_dir(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        self._path.chmod(0o600)

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # supervisors may still listen there
            self._path.parent.rmdir()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(10):
                message = json.loads(await reader.readline())
            op = self._ops.get(message.get("op"))
            answer = {"error": f"no operation {message.get('op')!r}"} if op is None else op(message)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError, AttributeError):
            pass  # a caller that leaves or babbles
        finally:
            with contextlib.suppress(OSError):
                writer.close()

"""Where a supervisor listens: its Unix socket for the ranks and the daemon, and a loopback port for MLflow clients.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Places:
    """Bound and listening sockets, opened before the ranks start: a rank may connect at once.

    Attributes:
        path: Of the Unix socket.
        token: What clients of the loopback port must show.
    """

    path: str
    unix: socket.socket
    tcp: socket.socket
    token: str

    @classmethod
    def open(cls, path: str) -> "Places":
        """Binds both.

        Raises:
            OSError: The folder is missing or the path is too long.
        """
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()  # left by a supervisor that was killed; the lock says that we are its heir
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(path)
        Path(path).chmod(0o600)
        unix.listen(128)
        tcp = socket.create_server(("127.0.0.1", 0), backlog=128)
        return cls(path, unix, tcp, secrets.token_urlsafe(24))

    @property
    def mlflow_uri(self) -> str:
        """What ``MLFLOW_TRACKING_URI`` says."""
        return f"http://127.0.0.1:{self.tcp.getsockname()[1]}"

    def remove(self) -> None:
        """Removes the Unix socket's file."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

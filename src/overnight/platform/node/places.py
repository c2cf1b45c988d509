"""Where a supervisor listens: its Unix socket for the ranks and the daemon, and a loopback port for MLflow clients.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import os
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

FIRST_PORT = 10_000
NUM_TRIES = 20


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
    """A TCP port that nobody listens on just now.

    If there is one, it is below those that the system hands out to whoever asks for any: such a one may be taken before
    the rank that shall listen on it has started.
    """
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, first_handed_out)
    for port in random.SystemRandom().sample(ports, min(NUM_TRIES, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

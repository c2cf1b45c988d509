"""A real SFTP server on loopback that serves one folder, and the URL of a place in it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface

T = TypeVar("T")
USER, PASSWORD = "somebody", "secret"


def answered(deed: Callable[[], T]) -> T | int:
    """What a deed returns, or the protocol's number of its failure."""
    try:
        return deed()
    except OSError as error:
        return SFTPServer.convert_errno(error.errno or 0)


class Handle(SFTPHandle):
    def stat(self) -> Any:
        return answered(lambda: SFTPAttributes.from_stat(os.fstat(self.file.fileno())))


class Folder(SFTPServerInterface):
    """The folder as the protocol asks for it."""

    def __init__(self, server: "Login", *arguments: Any) -> None:
        super().__init__(server, *arguments)
        self._root = server.root

    def _path(self, path: str) -> Path:
        return self._root / self.canonicalize(path).lstrip("/")

    def _list(self, path: str) -> list[SFTPAttributes]:
        entries = sorted(os.scandir(self._path(path)), key=lambda entry: entry.name)
        return [SFTPAttributes.from_stat(entry.stat(), entry.name) for entry in entries]

    def list_folder(self, path: str) -> Any:
        return answered(lambda: self._list(path))

    def stat(self, path: str) -> Any:
        return answered(lambda: SFTPAttributes.from_stat(self._path(path).stat()))

    lstat = stat

    def open(self, path: str, flags: int, attr: Any) -> Any:
        def deed() -> Handle:
            mode = ("r+b" if flags & os.O_RDWR else "wb") if flags & (os.O_WRONLY | os.O_RDWR) else "rb"
            handle = Handle(flags)
            descriptor = os.open(self._path(path), flags, 0o600)
            handle.file = handle.readfile = handle.writefile = os.fdopen(descriptor, mode)
            return handle

        return answered(deed)

    def _done(self, deed: Callable[[], object]) -> int:
        result = answered(lambda: deed() and None)
        return paramiko.SFTP_OK if result is None else result

    def remove(self, path: str) -> int:
        return self._done(self._path(path).unlink)

    def rename(self, oldpath: str, newpath: str) -> int:
        return self._done(lambda: self._path(oldpath).rename(self._path(newpath)))

    def mkdir(self, path: str, attr: Any) -> int:
        return self._done(self._path(path).mkdir)

    def rmdir(self, path: str) -> int:
        return self._done(self._path(path).rmdir)


class Login(paramiko.ServerInterface):
    def __init__(self, root: Path) -> None:
        self.root = root

    def check_auth_password(self, username: str, password: str) -> int:
        is_known = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if is_known else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


class Sftp:
    """The server.

    Attributes:
        url: Of its folder, with name and password.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key = paramiko.ECDSAKey.generate()
        self._transports: list[paramiko.Transport] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.url = f"sftp://{USER}:{PASSWORD}@127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            self._transports.append(transport)
            transport.add_server_key(self._key)
            transport.set_subsystem_handler("sftp", SFTPServer, Folder)
            transport.start_server(event=threading.Event(), server=Login(self._root))

    def drop(self) -> None:
        """Closes all connections, as a server does with idle ones; new ones are welcome."""
        while self._transports:
            self._transports.pop().close()

    def stop(self) -> None:
        """Ends the server."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.drop()


@contextmanager
def running_sftp(root: Path) -> Iterator[Sftp]:
    """A server of a folder."""
    server = Sftp(root)
    try:
        yield server
    finally:
        server.stop()

"""A real S3 server on loopback whose answers can be made to fail, and a place in a bucket of it."""

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import fsspec
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from overnight.trainer.checkpoint.remote import RemotePlace

BUCKET = "experiments"


class Store:
    """The server.

    Attributes:
        url: Where it answers.
        failing: Decides by method and path whether a request is answered with 503; may wait meanwhile.
        tampering: Decides likewise whether the middle byte of what is sent gets another value on its way.
        requests: Method and path of all requests so far.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.failing: Callable[[str, str], bool] = lambda method, path: False
        self.tampering: Callable[[str, str], bool] = lambda method, path: False
        self.requests: list[tuple[str, str]] = []

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.failing(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        if self.tampering(method, path):
            _tamper(environ)
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def start(self) -> None:
        """Serves from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def credentials(self) -> dict[str, str]:
        """Environment for this process and its children."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.url,
            "FSSPEC_S3_KEY": "key",
            "FSSPEC_S3_SECRET": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def place(self, folder: str) -> RemotePlace:
        """A place in the bucket, as this process sees it."""
        options = {"key": "key", "secret": "secret", "client_kwargs": {"region_name": "us-east-1"}}
        files = fsspec.filesystem("s3", endpoint_url=self.url, **options)
        return RemotePlace(f"s3://{BUCKET}/{folder}", files, f"{BUCKET}/{folder}")


def _tamper(environ: dict[str, Any]) -> None:
    """Changes a byte behind all checksums of the sender, as a proxy with bad memory does."""
    data = bytearray(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    data[len(data) // 2] ^= 1
    environ["wsgi.input"] = io.BytesIO(data)
    for name in [name for name in environ if "CHECKSUM" in name or name == "HTTP_CONTENT_MD5"]:
        del environ[name]


@contextmanager
def running_store() -> Iterator[Store]:
    """A server with an empty bucket."""
    store = Store()
    store.start()
    try:
        options = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=store.url, **options).create_bucket(Bucket=BUCKET)
        yield store
    finally:
        store.stop()


@contextmanager
def lent(store: Store, set_variable: Callable[[str, str], None]) -> Iterator[Store]:
    """A server for one test: its credentials are in the environment, and none of its answers fails afterwards."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # it keeps the endpoints of earlier environments
    for name, value in store.credentials.items():
        set_variable(name, value)
    try:
        yield store
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        store.failing = store.tampering = lambda method, path: False

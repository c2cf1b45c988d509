"""Whatever a store's driver puts into its errors, no secret leaves the place, and nothing else gets lost."""

import errno
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from overnight.core.addresses import discreet, discreet_json
from overnight.trainer.checkpoint.discretion import Discretion
from overnight.trainer.checkpoint.place import open_place
from overnight.trainer.checkpoint.retry import Patience

SECRET = "Hunter2/zwei drei"
QUOTED, BASIC = "Hunter2%2Fzwei%20drei", "bWU6SHVudGVyMi96d2VpIGRyZWk="
LEAKS = (SECRET, QUOTED, "Hunter2/zwei%20drei", BASIC, "Hunter2")


class DriverError(Exception):
    """As drivers make them: not even its arguments are its text."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def __str__(self) -> str:
        return f"cannot reach {self.url}"


class Telling(LocalFileSystem):
    """A real file system whose driver is asked to log in, and tells what it was given."""

    protocol = "telling"
    cachable = False
    error: Callable[[], Exception]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.storage_options = options

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/nowhere"

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, Any]:
        return {"client": {"password": SECRET, "key_filename": "/keys/of/mine"}}

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        raise Telling.error()


fsspec.register_implementation("telling", Telling, clobber=True)


def raised(error: Callable[[], Exception], url: str = f"telling://me:{QUOTED}@host/x") -> Exception:
    """What asking the place raises."""
    Telling.error = error
    place = open_place(url)
    place.patience = Patience(0.0)  # type: ignore[attr-defined]
    with pytest.raises(Exception) as caught:
        place.tokens()
    return caught.value


def chained() -> Exception:
    try:
        raise OSError(f"login with {SECRET}")
    except OSError as cause:
        error = ConnectionError("lost")
        error.__cause__ = cause
        return error


def noted() -> Exception:
    error = ValueError("lost")
    error.add_note(f"while {QUOTED} was sent")
    return error


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: ConnectionResetError(f"me:{SECRET}@host hung up"), ConnectionResetError),
        (lambda: DriverError(f"http://me:{QUOTED}@host/x"), Exception),
        (lambda: PermissionError(errno.EACCES, "refused", f"/x?pw={SECRET}"), PermissionError),
        (lambda: OSError(errno.ENOSPC, f"no space for {SECRET!r}"), OSError),
        (lambda: RuntimeError(f"Authorization: Basic {BASIC}"), RuntimeError),
        (lambda: KeyError(SECRET), KeyError),
        (lambda: UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, f"what is {SECRET}"), Exception),
        (lambda: ExceptionGroup("both", [OSError(SECRET)]), Exception),
        (chained, ConnectionError),
        (noted, ValueError),
    ],
)
def test_errors_of_all_kinds_keep_their_class_and_lose_the_secret(
    make: Callable[[], Exception], kind: type[Exception]
) -> None:
    error = raised(make)
    assert isinstance(error, kind) and getattr(error, "errno", None) == getattr(make(), "errno", None)
    told = "".join(traceback.format_exception(error, limit=0)) + repr(error) + str(vars(error))
    assert not any(leak in told for leak in LEAKS), told
    assert getattr(error, "filename", None) is None


def test_what_holds_no_secret_is_raised_as_it_is() -> None:
    error = DriverError("http://me@host/keys/of/mine")
    assert raised(lambda: error) is error


def test_the_name_of_the_driver_s_error_and_the_rest_of_its_text_stay() -> None:
    assert str(raised(lambda: DriverError(f"http://me:{QUOTED}@host/x"))) == (
        "DriverError: cannot reach http://me:***@host/x"
    )


def test_a_driver_that_connects_at_once_tells_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Any:
        raise ConnectionError(f"{path} refused {SECRET}")

    monkeypatch.setattr(Telling, "_get_kwargs_from_urls", refuse)
    with pytest.raises(ConnectionError) as caught:
        open_place(f"telling://me:{QUOTED}@host/x")
    assert str(caught.value) == "telling://me:***@host/x refused ***" and caught.value.__context__ is None


def test_secrets_come_from_the_environment_and_from_the_query_too() -> None:
    environ = {
        "HTTPS_PROXY": "http://me:proxy-word@host:3128", "AWS_SECRET_ACCESS_KEY": "abcd/efgh", "EDITOR_KEY": "space",
        "AWS_ACCESS_KEY_ID": "AKIA7", "AWS_ENDPOINT_URL": "http://host?sig=of-mine", "SSH_AUTH_SOCK": "/tmp/sock",
    }  # fmt: skip
    discretion = Discretion("store://host/x?token=in-query&versionId=77", {}, environ)
    told = "proxy-word, abcd%2Fefgh, of-mine, in-query; space AKIA7 /tmp/sock 77"
    assert discretion.hide(told) == "***, ***, ***, ***; space AKIA7 /tmp/sock 77"


def test_a_short_password_is_hidden_in_urls_alone() -> None:
    discretion = Discretion("store://me:a@host/x", {}, {})
    assert discretion.hide("a save at store://me:a@host/x failed") == "a save at store://me:***@host/x failed"


def test_texts_with_several_addresses() -> None:
    text = 'tried "ftp://me:one@host/x", (sftp://you:two@host:22/y?key=z) and https://host:443/a, asked a@b'
    assert discreet(text) == text.replace("one", "***").replace("two", "***").replace("key=z)", "key=***")
    assert discreet_json({"a": ["ftp://me:one@host", 3, None]}) == {"a": ["ftp://me:***@host", 3, None]}
    assert discreet(str(Path("/a:b@c"))) == "/a:b@c"

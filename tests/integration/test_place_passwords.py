"""A store whose URL has a password: everything reaches it, and nothing tells the password."""

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_lab import lay
from sftp_lab import PASSWORD, Sftp, running_sftp
from store_lab import BUCKET, Store
from writing_lab import Memory, client_of, finish, order

from overnight.cli import app as cli_app
from overnight.core.errors import FencedError, OvernightError
from overnight.platform.node.evidence import make_error
from overnight.trainer.checkpoint.comparison import compare
from overnight.trainer.checkpoint.export import export
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import LocalPlace, Token, open_place
from overnight.trainer.checkpoint.reading.finding import ALONE
from overnight.trainer.checkpoint.reading.inspection import inspect, locate
from overnight.trainer.checkpoint.retry import Patience
from overnight.trainer.checkpoint.sweeper import Sweeper
from overnight.trainer.exits import describe
from overnight.trainer.warm import WarmStart


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sftp]:
    (tmp_path / "served").mkdir()
    with running_sftp(tmp_path / "served") as running:
        yield running


@pytest.fixture
def url(server: Sftp, tmp_path: Path) -> str:
    """A place with a checkpoint of a module."""
    place = LocalPlace(tmp_path / "served" / "trial" / "checkpoints")
    place.root.mkdir(parents=True)
    lay(place, 10, [{"model": torch.nn.Linear(3, 2).state_dict()}])
    return f"{server.url}/trial/checkpoints"


def test_a_refused_save_does_not_tell_it(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory({"w": torch.ones(10)})
    with client_of(open_place(url), tmp_path, Token(2)) as client:
        assert finish(client, client.submit(order(1, 20, memory), memory)).committed
        claim(open_place(url), Token(3), None)
        error = finish(client, client.submit(order(2, 21, memory), memory)).error
    assert isinstance(error, FencedError) and "***@127.0.0.1" in error.message
    assert PASSWORD not in f"{error.to_dict()}{capfd.readouterr()}"
    stored = [path for path in (tmp_path / "served").rglob("*") if path.is_file()]
    assert len(stored) > 5 and not any(PASSWORD.encode() in path.read_bytes() for path in stored)


def test_warm_start_export_and_comparison_reach_it_and_do_not_tell_it(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    start = WarmStart({"model": model}, torch.device("cpu"), ALONE, tmp_path / "trials" / "mine", "mine")
    one = f"{url}/step-10.attempt-1.1"
    assert [start.begin(path=path) for path in (url, one)] == [["model"], ["model"]]
    with pytest.raises(OvernightError) as missing:
        start.begin(path=url, step=11)
    with pytest.raises(OvernightError) as other:
        start.begin(path=one, step=11)
    with pytest.raises(OvernightError) as strange:
        WarmStart({"net": model}, start.device, ALONE, start.trial_dir, "mine").begin(path=url)
    assert export(url, tmp_path / "model.safetensors")["objects"] == ["model"]
    assert compare(url, one).is_equal and inspect(one)["good"]
    source, _ = locate(url)
    told = [capfd.readouterr(), missing.value, other.value, strange.value, source]
    assert all(PASSWORD not in str(text) for text in told) and "***@127.0.0.1" in told[0].err


def test_neither_the_janitor_nor_the_command_line_tells_it(
    url: str, server: Sftp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path / "home"))
    codes = [
        cli_app.run(["checkpoints", *words])
        for words in (
            ["list", "-o", "json", url], ["list", url], ["list", f"{server.url}/empty"], ["verify", url],
            ["prune", "--dry-run", "-o", "json", url], ["list", f"{url}/step-9.attempt-1.1"],
        )
    ]  # fmt: skip
    told = capsys.readouterr()
    assert codes == [0, 0, 0, 0, 0, 4], told.err
    answers: list[object] = []
    Sweeper(answers.append).handle({"op": "dance", "place": url})
    assert "dance" in str(answers)
    assert PASSWORD not in f"{told}{answers}" and "***@127.0.0.1" in told.out and "***@127.0.0.1" in told.err


@pytest.fixture
def endpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store, given by the environment with a key in it, which no driver takes but S3's repeats."""
    for name in store.credentials:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint := f"{store.url}?token={PASSWORD}-of-the-endpoint")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setattr(Patience, "call", lambda patience, request: request())  # nobody waits for it to get better
    return endpoint


def test_what_the_driver_says_of_its_endpoint_is_passed_on_without_the_key(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path / "home"))
    url, memory = f"s3://{BUCKET}/trial/checkpoints", Memory({"w": torch.ones(10)})
    with client_of(url, tmp_path, Token(2), retry_seconds=0.0) as client:
        error = finish(client, client.submit(order(1, 20, memory), memory)).error
    with pytest.raises(OvernightError) as unread:
        inspect(url)
    assert cli_app.run(["checkpoints", "list", url]) != 0
    answers: list[dict[str, Any]] = []
    Sweeper(answers.append).handle({"op": "survey", "place": url})
    told = ["".join(traceback.format_exception(unread.value)), f"{error}", f"{answers}", capfd.readouterr().err]
    assert all("EndpointResolutionError" in text and "token=***" in text for text in told), told
    assert not any(PASSWORD in text for text in told)


def test_what_a_script_s_own_driver_says_is_reported_without_the_password() -> None:
    error = describe(ConnectionError(f"no answer from ftp://me:{PASSWORD}@host/x"), 3)
    again = make_error("ConnectionError", error["message"].replace("***", PASSWORD), f"ftp://me:{PASSWORD}@host")
    assert error["message"] == again["message"] == "no answer from ftp://me:***@host/x"
    assert PASSWORD not in f"{error}{again}" and again["traceback"] == "ftp://me:***@host"

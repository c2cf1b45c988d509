"""Every code block of the guide to checkpoints runs, with what it says about it."""

import json
import re
import shlex
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_lab import lay
from store_lab import BUCKET, Store
from trainer_ranks import Lab, shared_lab

from overnight import trainer
from overnight.cli import app
from overnight.core.settings import build_settings
from overnight.core.specfile import parse
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.tracked import state_of

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
HANDLE, WRAPPED, WARM, EVERY, KEEP, READ = [text for language, text in BLOCKS if language == "python"]
STORE, COMMANDS = [text.splitlines() for language, text in BLOCKS if language == "sh"]

SETUP = """
import torch
from overnight import trainer

net = torch.nn.Linear(3, 2)

def train(run, model, each=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        run.report(val_accuracy=step / 10)
        each()
"""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With the trial of the guide, which saved at the steps of the guide, and a file."""
    folder = tmp_path / "trials" / "id-7"
    (folder / "attempts" / "0001").mkdir(parents=True)
    order = {"trial_id": "id-7", "trial_name": "digits-7", "checkpoints": str(folder / "checkpoints")}
    (folder / "attempts" / "0001" / "order.json").write_text(json.dumps(order))
    for step, value in ((1000, 1.0), (2000, 2.0), (3000, 3.0)):
        model = learned(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=value)
        states = {"model": state_of(model), "optimizer": optimizer.state_dict()}
        lay(LocalPlace(folder / "checkpoints"), step, [{**states, "$run": {"step": step}}])
    torch.save(learned(7.0).state_dict(), tmp_path / "pretrained.pt")
    return tmp_path


def learned(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def run(lab: Lab, folder: Path, body: str, *, ranks: int = 1, env: dict[str, str] | None = None) -> str:
    (folder / "script.py").write_text(SETUP + body)
    assert lab.run(folder / "script.py", folder, ranks=ranks, env=env) == [0] * ranks, (folder / "log").read_text()
    return (folder / "log").read_text()


def test_every_block_is_run() -> None:
    assert [language for language, _ in BLOCKS] == ["python"] * 5 + ["sh", "yaml", "toml", "sh", "python"]


def test_a_handle(lab: Lab, tmp_path: Path) -> None:
    request, *rest = HANDLE.splitlines()
    body = f"""
with trainer.run(every=None) as run:
    def each():
        global save
        if run.step == 1:
            {request}
    train(run, net, each)
{textwrap.indent(chr(10).join(rest), "    ")}
    save.result(timeout=60)
    print(save.staged, save.committed, save.result())
"""
    assert re.search(r"True True \S*/checkpoints/step-1\.", run(lab, tmp_path, body))


def test_the_wrapper_of_three_ranks(lab: Lab, tmp_path: Path) -> None:
    body = "with trainer.run() as run:\n    {}    train(run, model)\n"
    plain = "model = torch.nn.parallel.DistributedDataParallel(net)\n"
    doubt = "the first update after a resume may differ"
    for name, wrapped in (("plain", plain), ("guide", WRAPPED)):
        (folder := tmp_path / name).mkdir()
        assert (doubt in run(lab, folder, body.format(wrapped), ranks=3)) == (wrapped == plain)


def test_when_and_which(lab: Lab, tmp_path: Path) -> None:
    assert len(EVERY.splitlines()) == 5
    body = "import os\n"
    for number, text in enumerate([*EVERY.splitlines(), KEEP]):
        body += f"os.environ['OVERNIGHT_TRIAL_DIR'] = '{tmp_path / str(number)}'\n{text}\n    train(run, net)\n"
    run(lab, tmp_path, body)
    assert len(list(tmp_path.glob("*/attempts/0001/final.json"))) == 6


@pytest.mark.parametrize(("number", "value", "lr"), [(0, 3.0, 0.1), (1, 2.0, 2.0), (2, 7.0, 0.1)])
def test_warm_starts(lab: Lab, home: Path, number: int, value: float, lr: float) -> None:
    line = WARM.splitlines()[number]
    body = f"""
with trainer.run() as run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run.track(model=net, optimizer=optimizer)
    {line}
    print(run.step, set(net.weight.ravel().tolist()), optimizer.param_groups[0]["lr"])
"""
    said = run(lab, home, body, env={"OVERNIGHT_TRIAL_DIR": str(home / "trials" / "mine")})
    assert f"0 {{{value}}} {lr}\n" in said


def test_a_place_behind_a_url(
    lab: Lab, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real S3 server stands in for the guide's, and as many lines as the guide has are done."""
    monkeypatch.chdir(tmp_path)
    for name in store.credentials:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path / "home"))
    exported: dict[str, str] = {}
    told: list[str] = []
    for line in STORE:
        program, *words = shlex.split(line, comments=True)
        match program:
            case "export":
                new = dict(word.split("=", 1) for word in words)
                exported |= new | ({"AWS_ENDPOINT_URL": store.url} if "AWS_ENDPOINT_URL" in new else {})
            case "python":
                assert words == ["train.py"] and f"://{BUCKET}/" in exported["OVERNIGHT_CHECKPOINTS"]
                run(lab, tmp_path, "with trainer.run() as run:\n    train(run, net)\n", env=exported)
                for name, value in exported.items():
                    monkeypatch.setenv(name, value)
            case _:
                assert (program, app.run(words)) == ("overnight", 0), capsys.readouterr()
                told.append(capsys.readouterr().out)
    assert len(told) == 3 and all("step-3.attempt-1.1" in text for text in told)
    assert "good" in told[1] and (tmp_path / "model.safetensors").exists()
    (trial,) = (tmp_path / ".overnight" / "script").iterdir()
    assert not (trial / "checkpoints").exists() and list(trial.glob("staging/*")) == []


def test_reading_with_torch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "trials" / "id-7")
    names: dict[str, Any] = {"trainer": trainer, "net": learned(0.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is one process only
        exec(READ, names)  # the guide's own words
    assert all((tensor == 3.0).all() for tensor in names["net"].state_dict().values())


def test_quotas() -> None:
    yaml, toml = (text for language, text in BLOCKS if language in ("yaml", "toml"))
    spec = parse(f"experiment: digits\nrun: python train.py\n{yaml}")
    assert spec.checkpoint_quota_bytes == 50 * 10**9
    assert build_settings({}, toml).checkpoint_quota_bytes == 200 * 10**9


@pytest.mark.parametrize("line", COMMANDS, ids=[line.split()[2] for line in COMMANDS])
def test_commands(home: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a path, as the guide says that a trial may be given."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("OVERNIGHT_HOME", str(home / "home"))
    program, *words = shlex.split(line, comments=True)
    place = str(home / "trials" / "id-7" / "checkpoints")
    code = app.run([word.replace("digits-7", place) for word in words])
    told: Any = capsys.readouterr()
    assert (program, code) == ("overnight", 0), told
    assert told.out or (home / "model.safetensors").exists()

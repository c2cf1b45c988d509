"""``overnight checkpoints`` on the checkpoints of a real run and of a trial of a real server."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from place_lab import begin, fingerprint, lay, steps

from overnight.cli import app as cli_app
from overnight.testing.server import RunningServer, ScriptedNode
from overnight.trainer.checkpoint.comparison import compare
from overnight.trainer.checkpoint.pins import pin, read_pins
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token

SCRIPT = """
import torch
from overnight import trainer

with trainer.run(every=None, keep=9) as run:
    model = torch.nn.Linear(3, 2)
    frozen = torch.arange(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    extra = {"nan": torch.tensor([float("nan"), 1.0]), "grows": torch.zeros(2), "half": torch.ones(3).bfloat16(),
             "complex": torch.ones(2, dtype=torch.complex64), "empty": torch.empty(0),
             "inf": torch.tensor([float("inf")]), "n": 0, "same": "text"}
    run.track(model=model, optimizer=optimizer, extra=extra, frozen=frozen)
    saved = None
    for step in run.steps(3):
        if saved is not None:
            saved.result()  # else the next save would be put off while this one is written
        model(torch.ones(3)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        extra["n"] = step
        extra["half"] += 1
        extra["complex"] *= 1j
        if step == 2:
            extra["nan"] = torch.tensor([float("nan"), 3.0])
            extra["grows"] = torch.zeros(3)
            extra["new"] = torch.ones(1)
        saved = run.save()
"""

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint place of a run of three updates, saved after each."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=clean, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [place] = folder.glob(".overnight/train/*/checkpoints")
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> LocalPlace:
    """A copy of it that a test may spoil."""
    shutil.copytree(trained, tmp_path / "mine" / "checkpoints")
    return LocalPlace(tmp_path / "mine" / "checkpoints")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line here; exit code and both outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: str) -> tuple[int, str, str]:
        code = cli_app.run(["checkpoints", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def data(answer: tuple[int, str, str]) -> Any:
    return json.loads(answer[1])["data"]


@pytest.mark.parametrize("words", [[], ["list"], ["verify"], ["diff"], ["export"], ["prune"]])
def test_help_has_examples(words: list[str], cli: Cli) -> None:
    code, out, _ = cli(*words, "--help")
    assert code == 0 and f"overnight checkpoints {' '.join(words)}".strip() in out


def test_list(place: LocalPlace, cli: Cli) -> None:
    code, out, err = cli("list", str(place.root))
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [f"step-{step}.attempt-1.1" for step in (1, 2, 3)]
    assert "newest" in lines[-1] and str(place.root) in err
    held = data(cli("list", "-o", "json", str(place.root.parent)))
    assert held["place"] == str(place.root)
    assert [item["role"] for item in held["items"]][-1] == "newest"
    assert held["bytes"] >= sum(item["bytes"] for item in held["items"]) > 0
    assert len(data(cli("list", "-o", "json", f"{place.root}@2"))["items"]) == 1
    assert len(data(cli("list", "-o", "json", f"{place.root}/step-2.attempt-1.1"))["items"]) == 1


def test_what_is_not_there_is_a_short_answer(cli: Cli, tmp_path: Path, place: LocalPlace) -> None:
    assert cli("list", "no-such-1")[0] == 3
    assert cli("list", "./nowhere")[0] == 4
    assert cli("verify", f"{place.root}@99")[0] == 4
    assert cli("list", "bogus://x")[0] == 2
    (tmp_path / "empty").mkdir()
    code, out, err = cli("list", "./empty")
    assert (code, out) == (0, "") and "no checkpoints" in err
    assert cli("verify", "./empty")[0] == 4
    code, _, err = cli("list", f"{place.root}@99")
    assert code == 4 and "no such checkpoint" in err
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    code, _, err = cli("list", "./photos")
    assert code == 4 and "neither a trial nor a checkpoint place" in err


@pytest.mark.parametrize("verb", ["list", "verify"])
@pytest.mark.parametrize("target", ["", " ", "@3", "digits-7@-1", "./here@-1", "./here@"])
def test_what_cannot_be_a_target_is_refused(verb: str, target: str, cli: Cli) -> None:
    code, out, err = cli(verb, target)
    assert (code, out) == (2, "") and "digits-7@2000" in err
    assert "no step" in err if len(target) > 2 else "names no checkpoints" in err


def test_one_odd_entry_is_listed_as_damaged_with_the_reason(place: LocalPlace, cli: Cli) -> None:
    (place.root / "step-1000.attempt-1.1").write_text("no folder")
    code, out, _ = cli("list", str(place.root))
    assert code == 0 and out.count("step-") == 4
    [line] = [line for line in out.splitlines() if "step-1000" in line]
    assert "damaged" in line and "Not a directory" in line
    items = data(cli("list", "-o", "json", str(place.root)))["items"]
    problems = {item["step"]: item["problem"] for item in items}
    assert "Not a directory" in problems.pop(1000) and set(problems.values()) == {""}
    assert cli("verify", str(place.root))[0] == 1
    assert cli("prune", "--dry-run", str(place.root))[0] == 0


def test_a_file_url_is_a_path(place: LocalPlace, cli: Cli) -> None:
    for target in (place.root, place.root.parent, place.path(CheckpointName(2, Token(1)))):
        assert data(cli("list", "-o", "json", target.as_uri())) == data(cli("list", "-o", "json", str(target)))
    assert cli("verify", f"{place.root.as_uri()}@3")[0] == 0
    assert cli("list", "file:///no/where")[0] == 4


class _Refusing(MemoryFileSystem):  # type: ignore[misc]
    """A store whose driver refuses with an error of its own, as one without credentials does."""

    protocol = "refusing"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        raise KeyError("Unable to locate credentials")


@pytest.mark.parametrize("words", [["list"], ["verify"], ["prune"], ["verify", "@3"]])
def test_what_a_stores_driver_raises_is_a_clear_error(words: list[str], cli: Cli) -> None:
    fsspec.register_implementation("refusing", _Refusing, clobber=True)
    code, out, err = cli(words[0], "".join(["refusing://foo/bar", *words[1:]]))
    assert (code, out) == (1, "")
    assert "refusing://foo/bar" in err and "Unable to locate credentials" in err
    assert "unexpected" not in err and "report" not in err


def test_verify_names_every_damaged_file(place: LocalPlace, cli: Cli) -> None:
    code, out, _ = cli("verify", str(place.root))
    assert code == 0 and out.count("good") == len(place.checkpoints())
    assert read_pins(place) == []
    folder = place.path(CheckpointName(2, Token(1)))
    for file in ("state-0.json", "index.json"):
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(bytes(content))
    (place.path(CheckpointName(1, Token(1))) / "manifest.json").unlink()
    code, out, _ = cli("verify", "-o", "json", str(place.root))
    found = {result["name"]: result for result in json.loads(out)["data"]}
    assert code == 1
    assert found["step-3.attempt-1.1"]["good"]
    problems = sorted(found["step-2.attempt-1.1"]["problems"])
    assert len(problems) == 2 and "index.json" in problems[0] and "state-0.json" in problems[1]
    assert "manifest.json" in found["step-1.attempt-1.1"]["problems"][0]
    assert cli("verify", f"{place.root}@3")[0] == 0


def test_verify_needs_no_torch_and_reads_a_place_that_takes_no_pins(place: LocalPlace, cli: Cli) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom overnight.cli.app import run\n"
        f"codes = [run(['checkpoints', verb, {str(place.root)!r}]) for verb in ('verify', 'list')]\n"
        f"codes.append(run(['checkpoints', 'diff', {str(place.root)!r}, {str(place.root)!r}]))\nprint(codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[0, 0, 1]", done.stderr
    assert "torch is not installed" in done.stderr


def test_diff_says_what_changed_and_by_how_much(place: LocalPlace, cli: Cli) -> None:
    one, two = (place.path(CheckpointName(step, Token(1))) for step in (1, 2))
    found = compare(one, two)
    changes = {change.key: change for change in found.tensors}
    assert not found.is_equal and any(key.endswith("new") for key in found.only_second) and found.only_first == ()
    assert not any("frozen" in key or "empty" in key or "inf" in key for key in changes)
    nan = next(change for key, change in changes.items() if key.endswith("nan"))
    assert (nan.max_change, nan.num_changed, nan.num_elements) == (2.0, 1, 2)
    assert nan.relative_change == pytest.approx(2.0)
    half = next(change for key, change in changes.items() if key.endswith("half"))
    assert (half.before, half.max_change, half.num_changed) == ("bfloat16[3]", 1.0, 3)
    turned = next(change for key, change in changes.items() if key.endswith("complex"))
    assert turned.max_change == pytest.approx(math.sqrt(2))
    grown = next(change for key, change in changes.items() if key.endswith("grows"))
    assert (grown.before, grown.after, grown.max_change) == ("float32[2]", "float32[3]", None)
    assert any(value.path == "extra.n" and (value.before, value.after) == ("1", "2") for value in found.values)
    assert not any("same" in value.path for value in found.values)
    code, out, err = cli("diff", f"{place.root}@1", f"{place.root}@2")
    assert code == 0 and "bfloat16[3]" in out and "extra.n: 1 -> 2" in out and "tensors changed" in err
    assert data(cli("diff", "-o", "json", f"{place.root}@1", f"{place.root}@2"))["equal"] is False


def test_a_renamed_folder_is_named_and_is_not_the_checkpoint_of_a_step(
    place: LocalPlace, cli: Cli, tmp_path: Path
) -> None:
    first, *_, last = place.checkpoints()
    renamed = CheckpointName(last.step, Token(9))
    shutil.copytree(place.path(first), place.path(renamed))
    [item] = [
        item for item in data(cli("list", "-o", "json", str(place.root)))["items"] if item["name"] == str(renamed)
    ]
    assert item["kept_as"] == f"foreign: its manifest belongs to {first}" and item["role"] == "hidden"
    code, _, err = cli("export", f"{place.root}@{last.step}", str(tmp_path / "x.pt"))
    assert (code, err) == (0, ""), err


def test_equal_checkpoints_are_equal(place: LocalPlace, cli: Cli) -> None:
    assert compare(place.root, place.path(CheckpointName(3, Token(1)))).is_equal
    assert "same state" in cli("diff", str(place.root), f"{place.root}@3")[1]
    assert data(cli("diff", "-o", "json", str(place.root), f"{place.root}@3"))["num_equal"] > 5


def test_the_amount_of_a_change_is_the_weights_own(place: LocalPlace) -> None:
    found = compare(place.path(CheckpointName(1, Token(1))), place.path(CheckpointName(2, Token(1))))
    [weight] = [change for change in found.tensors if change.key.startswith("model") and "weight" in change.key]
    # Twice the same gradient of ones: the first step moves by 0.1, the second by 0.1 * 1.9.
    assert weight.max_change == pytest.approx(0.19, abs=1e-6)
    assert weight.num_changed == weight.num_elements == 6
    assert torch.isfinite(torch.tensor(weight.relative_change or math.nan))


def test_export(place: LocalPlace, cli: Cli, tmp_path: Path) -> None:
    facts = data(cli("export", "-o", "json", f"{place.root}@2", "model.safetensors"))
    assert (facts["step"], facts["objects"], facts["tensors"]) == (2, ["model"], 2)
    assert (tmp_path / "model.safetensors").stat().st_size == facts["bytes"]
    code, _, err = cli("export", str(place.root), "model.safetensors")
    assert code == 2 and "exists already" in err
    code, out, _ = cli("export", str(place.root), "--overwrite", "model.safetensors")
    assert code == 0 and str(tmp_path / "model.safetensors") in out
    assert cli("export", str(place.root), "model.zip")[0] == 2
    assert cli("export", str(place.root), "--name", "nothing", "other.safetensors")[0] == 4
    assert cli("export", str(place.root), "all.pt")[0] == 0
    states = torch.load(tmp_path / "all.pt", weights_only=True)
    assert states["extra"]["n"] == 3 and set(states["model"]) == {"weight", "bias"}
    assert read_pins(place) == []


@pytest.fixture
def forked(tmp_path: Path) -> LocalPlace:
    place = LocalPlace(tmp_path / "forked")
    begin(place, Token(1))
    for step in (10, 20, 30):
        lay(place, step)
    begin(place, Token(2), CheckpointName(20, Token(1)))
    lay(place, 25, Token(2))
    return place


def test_prune_of_a_folder_asks_and_rehearses(forked: LocalPlace, cli: Cli) -> None:
    before = fingerprint(forked.root)
    code, out, _ = cli("prune", str(forked.root), "--dry-run")
    assert code == 0 and "would delete" in out and "step-30.attempt-1.1" in out and "hidden" in out
    code, out, err = cli("prune", str(forked.root))
    assert code == 2 and "--yes" in err
    assert cli("prune", "-o", "json", str(forked.root))[0] == 2
    assert fingerprint(forked.root) == before
    deleted = data(cli("prune", "-o", "json", "--yes", str(forked.root)))["deleted"]
    assert [deletion["entry"] for deletion in deleted] == ["step-30.attempt-1.1"]
    assert steps(forked) == [(1, 10), (1, 20), (2, 25)]
    assert "nothing to delete" in cli("prune", str(forked.root))[1]
    assert cli("prune", "--keep", "2", "-y", str(forked.root))[0] == 0
    assert steps(forked) == [(1, 20), (2, 25)]


def test_prune_refuses_what_is_in_use(forked: LocalPlace, cli: Cli) -> None:
    before = fingerprint(forked.root)
    code, _, err = cli("prune", "-y", f"{forked.root}@25")
    assert code == 6 and "last good" in err
    with pin(forked, CheckpointName(10, Token(1)), "eval [red]x"):
        code, _, err = cli("prune", "-y", f"{forked.root}/step-10.attempt-1.1")
        assert code == 6 and "eval [red]x" in err
        assert "read by eval [red]x" in cli("list", str(forked.root))[1]
    assert cli("prune", "-y", f"{forked.root}@99")[0] == 4
    assert fingerprint(forked.root) == before
    assert cli("prune", "-y", f"{forked.root}@10")[0] == 0
    assert (1, 10) not in steps(forked)


def test_a_person_may_say_no(forked: LocalPlace, tmp_path: Path) -> None:
    import pty

    before = fingerprint(forked.root)
    leader, follower = pty.openpty()
    line = [sys.executable, "-m", "overnight", "checkpoints", "prune", str(forked.root)]
    child = subprocess.Popen(line, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    try:
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(leader, 4096)
        os.write(leader, b"n\n")
        assert child.wait(30) == 1
    finally:
        child.kill()
        child.wait()
        os.close(leader)
    assert b"step-30" in shown
    assert fingerprint(forked.root) == before


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path / "home", OVERNIGHT_LEASE_SECONDS="300") as running:
        yield running


def test_a_trial_by_its_name(server: RunningServer, place: LocalPlace, cli: Cli) -> None:
    node = ScriptedNode(server.client)
    node.hello()
    body = {"config": {"experiment": "digits", "run": {"kind": "script", "target": "train.py"}}}
    trial = server.client.post("/v1/proposals", json=body).json()["trials"][0]
    [launch] = node.launches()
    shutil.copytree(place.root, server.home.checkpoints(trial["id"]))
    node.start(launch["attempt_id"])
    held = data(cli("list", "-o", "json", "digits-1"))
    assert [item["step"] for item in held["items"]][:3] == [1, 2, 3]
    assert held["place"] == str(server.home.checkpoints(trial["id"]))
    assert cli("verify", "digits-1")[0] == 0
    assert cli("diff", "digits-1@1", "digits-1")[0] == 0
    code, _, err = cli("prune", "-y", "digits-1@1")
    assert code == 6 and "at work" in err
    assert cli("list", "digits-2")[0] == 4
    node.exit(launch["attempt_id"])
    deadline = time.monotonic() + 30
    while cli("prune", "--dry-run", "digits-1@1")[0] != 0:
        assert time.monotonic() < deadline, "the lease does not become clean"
    assert len(data(cli("list", "-o", "json", "digits-1"))["items"]) == len(held["items"])
    assert cli("prune", "-y", "--reason", "tidy", "digits-1@1")[0] == 0
    code, _, err = cli("list", "digits-1@1")
    assert code == 4 and "no such checkpoint" in err
    shutil.rmtree(server.home.checkpoints(trial["id"]))
    code, _, err = cli("verify", "digits-1")
    assert code == 4 and "on this machine" in err

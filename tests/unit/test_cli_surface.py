"""The surface of the command line: quick help, lazy commands, errors of one or two lines, harmless output."""

import ast
import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import overnight.cli
from overnight.cli import app as cli_app
from overnight.cli import preparing, run
from overnight.cli.session import Session
from overnight.core import errors
from overnight.core.enums import Mode, RunKind
from overnight.core.models.spec import Command, Objective
from overnight.core.settings import Settings

HEAVY = ("torch", "mlflow", "sqlalchemy", "fastapi", "textual", "httpx", "pydantic", "optuna", "numpy", "yaml")


@pytest.fixture
def overnight_cli(tmp_path):
    """Runs a command line in a process of its own, with a home of its own."""

    def run(*words, cwd=tmp_path, **env):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
        return subprocess.run(
            [sys.executable, "-m", "overnight", *words],
            cwd=cwd, env=clean | {"OVERNIGHT_HOME": str(tmp_path / "home"), "COLUMNS": "80"} | env,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom overnight.cli.app import run\n"
        f"code = run(['--help'])\nprint([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in cli_app.COMMANDS)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) <= 0.4


def test_every_command_is_where_the_table_says():
    for name, entry in cli_app.COMMANDS.items():
        command = cli_app.load(name)
        assert command.name == name
        module, _, attribute = entry.place.partition(":")
        assert hasattr(import_module(module), attribute)


@pytest.mark.parametrize("name", list(cli_app.COMMANDS))
def test_every_command_has_help_with_examples(name, capsys):
    assert cli_app.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"overnight {name}" in out


@pytest.mark.parametrize("words", [["devices", "drain"], ["db", "backup"], ["db", "check"]])
def test_subcommands_have_examples_too(words, capsys):
    assert cli_app.run([*words, "--help"]) == 0
    assert "overnight " + " ".join(words) in capsys.readouterr().out


def test_old_pythons_can_read_the_entry_point():
    for path in (
        Path(overnight.cli.__file__),
        Path(overnight.__file__),
        Path(overnight.__file__).parent / "__main__.py",
    ):
        ast.parse(path.read_text(), feature_version=(3, 6))


def test_an_old_python_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit) as caught:
        overnight.cli.main()
    assert caught.value.code == 2
    assert "needs Python 3.11 or newer" in capsys.readouterr().err


def test_a_mistyped_command_is_named(overnight_cli):
    done = overnight_cli("submti")
    assert done.returncode == 2
    assert "Did you mean 'submit'?" in done.stderr


FILES = {
    "bad.py": "def f(:\n    pass\n",
    "nul.py": "x = 1\0\n",
    "good.py": "print('hi')\n",
    "bad.yaml": "experiment: a\nrun: python good.py\npriorty: normal\n",
    "sweepless.yaml": "experiment: a\nrun: python good.py\n",
    "gone.yaml": "experiment: a\nrun: python gone.py\n",
    "python.yaml": "experiment: a\nrun: python good.py\npython: .venv\n",
    "env.yaml": "experiment: a\nrun: python good.py\nenv: {NOT_SET_HERE: null}\n",
    "data.csv": "a,b\n",
    "markup.yaml": "experiment: '[/bold]\\e[31mx'\nrun: x\n",
}

BAD_INPUT = [
    (["submit", "gooood.py"], 2, "there is no file gooood.py"),
    (["submit", "bad.py"], 2, "bad.py:1: invalid syntax"),
    (["submit", "nul.py"], 2, "nul"),
    (["submit", "data.csv"], 2, "neither a Python script"),
    (["submit", "--params", "{", "good.py"], 2, "not JSON"),
    (["submit", "--params", '{"lr": NaN}', "good.py"], 2, "NaN is not a finite number"),
    (["submit", "-p", "lr=NaN", "good.py"], 2, "NaN"),
    (["submit", "-p", "lr", "good.py"], 2, "name=value"),
    (["submit", "--gpus", "many", "good.py"], 2, "gpus"),
    (["submit", "--priority", "urgnt", "good.py"], 2, "Did you mean 'urgent'?"),
    (["submit", "--experiment", "../x", "good.py"], 2, "no name"),
    (["submit", "--python", "nowhere", "good.py"], 2, "no interpreter"),
    (["submit", "--replicates", "0", "good.py"], 2, "replicates"),
    (["submit", "--replicates", "100000", "good.py"], 2, "replicates"),
    (["submit", "--key", "", "good.py"], 2, "key"),
    (["submit", "--key", "k" * 300, "good.py"], 2, "key"),
    (["submit", "--note", "n" * 10_001, "good.py"], 2, "note"),
    (["submit", "--objective", "", "good.py"], 2, "objective.metric"),
    (["submit", "good.py", "--objective", "loss"], 2, "stands behind the script"),
    (["submit", "no-such-program", "--lr", "1"], 2, "there is no file no-such-program"),
    (["submit", "./no-such-program"], 2, "there is no file no-such-program"),
    (["submit", "."], 2, "is no file"),
    (["submit", "good.py", "--dry-run"], 2, "stands behind the script"),
    (["submit", "good.py", "--lr", "1", "--lr", "2"], 2, "given twice"),
    (["submit", "bad.yaml"], 2, "bad.yaml:3: there is no key 'priorty'"),
    (["submit", "gone.yaml"], 2, "gone.py"),
    (["submit", "python.yaml"], 2, "no interpreter"),
    (["submit", "env.yaml"], 2, "NOT_SET_HERE"),
    (["submit", "markup.yaml"], 2, "is no name"),
    (["sweep", "sweepless.yaml"], 2, "has no sweep"),
    (["sweep"], 2, "give one spec file"),
    (["run", "bad.py"], 2, "invalid syntax"),
    (["run", "gooood.py"], 2, "Did you mean good.py?"),
    (["submit", "good.py"], 3, "overnight up"),
    (["status"], 3, "overnight up"),
    (["logs", "a-1"], 3, "overnight up"),
    (["ls", "--state", "runing"], 2, "Did you mean running"),
    (["token"], 4, "token"),
    (["db", "info"], 1, "no database"),
    (["logs"], 2, "Missing argument"),
    (["ls", "--limit", "0"], 2, "limit"),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD_INPUT, ids=[" ".join(case[0])[:60] for case in BAD_INPUT])
def test_bad_input_is_a_short_answer(words, code, message, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli_app.run(words) == code
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert "\x1b" not in err + out
    assert out == ""


def test_errors_in_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OVERNIGHT_HOME", str(tmp_path))
    assert cli_app.run(["status", "-o", "json"]) == 3
    envelope = json.loads(capsys.readouterr().out)
    assert envelope["v"] == 1
    assert envelope["error"]["code"] == "server_away"
    assert envelope["error"]["retryable"] is True


def test_a_setting_that_does_not_validate_is_named(overnight_cli):
    done = overnight_cli("status", OVERNIGHT_POOL="gpu:x")
    assert done.returncode == 2
    assert "pool 'gpu:x'" in done.stderr
    done = overnight_cli("status", OVERNIGHT_DEBUG="1", OVERNIGHT_PORT="x")
    assert "Traceback" in done.stderr


def test_a_home_that_cannot_be_read_is_a_short_answer(overnight_cli, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "overnight.toml").write_bytes(b"\xff\xfe")
    done = overnight_cli("ls")
    assert done.returncode == 2
    assert "overnight.toml cannot be read" in done.stderr
    (tmp_path / "home" / "overnight.toml").write_text("poool = 'cpu:1'")
    assert "poool" in overnight_cli("ls").stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ServerAwayError("x"), 3), (errors.NotFoundError("x"), 4), (errors.HomeHeldError("x"), 6),
        (errors.InvalidSpecError("x"), 2), (errors.MissingExtraError("x", "server"), 1), (RuntimeError("x"), 1),
        (PermissionError(13, "Permission denied", "/x"), 1),
    ],
)  # fmt: skip
def test_exit_codes(error, code, capsys):
    assert Session({}).fail(error) == code
    assert "error: " in capsys.readouterr().err


def test_foreign_text_in_an_error_is_harmless(capsys):
    Session({}).fail(errors.NotFoundError("no [/bold]\x1b]0;owned\x07 \u202etrial", hint="[red]x"))
    err = capsys.readouterr().err
    assert "[/bold]" in err
    assert "[red]x" in err
    assert not any(char in err for char in "\x1b\x07\u202e")


def test_a_missing_extra_names_the_pip_line(tmp_path):
    code = (
        "import sys; sys.modules['sqlalchemy'] = None; from overnight.cli.app import run; sys.exit(run(['db', 'info']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OVERNIGHT_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "pip install 'overnight[server]'" in done.stderr


def test_the_dashboard_says_that_it_needs_a_terminal(overnight_cli):
    done = overnight_cli("tui")
    assert done.returncode == 1
    assert "needs a terminal" in done.stderr
    assert "overnight status" in done.stderr


def test_the_schema_is_published(overnight_cli):
    done = overnight_cli("submit", "--schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["title"] == "overnight spec"


def test_completion_knows_the_commands(overnight_cli):
    done = overnight_cli(_OVERNIGHT_COMPLETE="complete_bash", COMP_WORDS="overnight su", COMP_CWORD="1")
    assert done.stdout.split() == ["submit"]


def test_run_is_the_interpreter_itself(overnight_cli, tmp_path):
    (tmp_path / "s.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('OVERNIGHT_TRIAL_ID'), __name__)\n"
    )
    done = overnight_cli("run", "s.py", "--lr", "3e-4", "--", "-o", OVERNIGHT_TRIAL_ID="tri-x")
    assert done.stdout == "['--lr', '3e-4', '--', '-o'] None __main__\n"
    assert overnight_cli("run", "--fresh", "s.py").stdout.startswith("['--fresh']")
    (tmp_path / "s.py").write_text("breakpoint()\nprint('after')\nraise SystemExit(7)\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    stopped = subprocess.run(
        [sys.executable, "-m", "overnight", "run", "s.py"],
        cwd=tmp_path, env=clean, input="p 6 * 7\nc\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "42" in stopped.stdout
    assert stopped.returncode == 7


def prepared(target, *words, **overrides):
    """What ``submit`` would send, with the words behind the target."""
    return preparing.prepare(Path(target), words, preparing.Overrides(**overrides), Settings(home=Path("home")), {})


def test_any_program_is_submitted_with_its_words_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "anything"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = prepared("bin/anything", "--flag", "--gpus", "x=1")
    assert found.config.run == Command(kind=RunKind.COMMAND, target="./anything", argv=("--flag", "--gpus", "x=1"))
    assert found.config.workdir == str(tmp_path / "bin")
    assert found.config.experiment == "anything"
    assert found.params == {}


def test_a_program_of_the_path_runs_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert prepared("sh", "-c", "true").config.run == Command(kind=RunKind.COMMAND, target="sh", argv=("-c", "true"))
    script = prepared("python3", "train.py", "--lr", "1").config
    assert script.run == Command(kind=RunKind.SCRIPT, target="train.py", argv=("--lr", "1"))
    assert (script.experiment, script.workdir) == ("train", str(tmp_path))


def test_the_command_line_names_an_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "spec.yaml").write_text(
        "script: train.py\nobjective: {metric: a, mode: max, source: pattern, pattern: 'acc=(.*)'}\n"
    )
    assert prepared("train.py", objective="val_loss").config.objective == Objective(metric="val_loss")
    assert prepared("train.py", objective="a:b:max").config.objective == Objective(metric="a:b", mode=Mode.MAX)
    changed = prepared("spec.yaml", objective="acc").config.objective
    assert changed == Objective(metric="acc", mode=Mode.MAX, source="pattern", pattern="acc=(.*)")


def test_torchrun_leaves_the_words_of_the_script_alone():
    from torch.distributed.run import parse_args

    line = run.command_line("python", Path("train.py"), ["--n", "7", "--r", "-m"], fresh=False, procs=2)
    parsed = parse_args(line[line.index("torch.distributed.run") + 1 :])
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["--n", "7", "--r", "-m"])
    assert parsed.nproc_per_node == "2"


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_full_disk_behind_standard_output_is_a_short_answer(format, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("t")
    line = f"{sys.executable} -m overnight --home {tmp_path} token -o {format} > /dev/full"
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_standard_output_is_no_fault(tmp_path):
    line = f"{sys.executable} -m overnight --home {tmp_path} status >&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "no server is running" in done.stderr


def test_a_pipe_is_no_spec_and_is_not_waited_for(tmp_path, overnight_cli):
    os.mkfifo(tmp_path / "spec.yaml")
    done = overnight_cli("submit", "spec.yaml")
    assert done.returncode == 2
    assert "is no regular file" in done.stderr


def test_a_long_wait_is_explained_once(capsys):
    session = Session({})
    full = errors.StoreFullError("there is no space left", hint="Make room.")
    for seconds in (0.1, 1.9, 2.5, 4.0, 8.0):
        session._note_wait(full, seconds)
    session._note_wait(errors.ServerAwayError("no answer", hint="Start it."), 9.0)
    session._note_wait(full, 0.2)
    session._note_wait(full, 2.2)
    captured = capsys.readouterr()
    once = "waiting: there is no space left. Make room."
    assert captured.err.splitlines() == [once, "waiting: no answer.", once]
    assert captured.out == ""

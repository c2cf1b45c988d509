"""Attempts through a real daemon, warm process, supervisor and ranks, against a small real server."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_lab
import pytest
from node_lab import Lab, wait_for

# A script's own line to its supervisor, as the trainer has one.
LINE = """
import http.client, json, os, socket, sys, time
class Line(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(os.environ["OVERNIGHT_SUPERVISOR"])
def call(method, route, body=None):
    line = Line("localhost"); line.request(method, route, json.dumps(body) if body is not None else None)
    answer = line.getresponse(); return answer.status, json.loads(answer.read())
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with node_lab.warm_lab() as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Lab]:
    with node_lab.lab(node_lab.bare_python(tmp_path / "venv")) as made:
        yield made


def run(lab: Lab, text: str, name: str = "train.py", **fields: Any) -> tuple[str, dict[str, Any]]:
    lab.script(text, name)
    attempt_id = lab.run(name, **fields)
    return attempt_id, lab.server.exit_of(attempt_id)


def test_a_script_runs_warm_as_if_by_python(lab: Lab) -> None:
    text = """
        import sys, os, __main__
        print("NAME", __name__, "ARGV", sys.argv, "FILE", __main__.__file__ == os.path.abspath("train.py"))
        print("PATH0", sys.path[0] == os.getcwd(), "TORCH", "torch" in sys.modules, "STDIN", repr(sys.stdin.read()))
        print("SPEC", __spec__, "DOC", __doc__, "PACKAGE", __package__)
        print("\\u2603 snow")
    """
    import textwrap

    attempt_id, report = run(lab, textwrap.dedent(text), params={"lr": 0.001, "m": {"depth": 3, "on": True}})
    log = lab.log(attempt_id)
    assert "NAME __main__ ARGV ['train.py', '--lr', '0.001', '--m.depth', '3', '--m.on'] FILE True" in log
    assert "PATH0 True TORCH True STDIN ''" in log
    assert "SPEC None DOC None PACKAGE None" in log
    assert "\u2603 snow" in log
    assert report["exit_codes"] == [0]
    assert lab.server.events(attempt_id, "started")[0]["data"]["warm"] is True
    assert lab.server.wait_ended(attempt_id)["vanished"] is False
    assert lab.alive(attempt_id) == []


def test_ranks_share_no_randomness(lab: Lab) -> None:
    text = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    seen = [lab.log(run(lab, text)[0]).split() for _ in range(2)]
    for first, second in zip(*seen, strict=True):
        assert first != second


def test_loader_workers_need_no_main_guard(lab: Lab) -> None:
    text = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(8.0))
print(sum(float(x.sum()) for (x,) in DataLoader(data, batch_size=2, num_workers=2)))
"""
    attempt_id, report = run(lab, text)
    assert report["exit_codes"] == [0], lab.log(attempt_id)
    assert "28.0" in lab.log(attempt_id)


def test_two_ranks_meet_over_gloo(lab: Lab) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print("SUM", x.item(), dist.get_world_size())
dist.destroy_process_group()
"""
    attempt_id, report = run(lab, text, num_ranks=2)
    assert report["exit_codes"] == [0, 0], lab.log(attempt_id) + lab.log(attempt_id, 1)
    assert "SUM 3.0 2" in lab.log(attempt_id) and "SUM 3.0 2" in lab.log(attempt_id, 1)


def test_an_exception_arrives_with_type_message_and_a_clean_traceback(lab: Lab) -> None:
    attempt_id, report = run(lab, "def f():\n    raise KeyError('lr')\nf()\n")
    assert report["exit_codes"] == [1] and report["failed_rank"] == 0
    assert (report["error"]["type"], report["error"]["message"]) == ("KeyError", "'lr'")
    assert "overnight/platform" not in lab.log(attempt_id)
    assert report["error"]["traceback"].startswith("Traceback (most recent call last):")
    assert report["last_lines"][-1] == "KeyError: 'lr'"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x = (\n", "SyntaxError"),
        ("import no_such_library\n", "ModuleNotFoundError"),
        ("raise MemoryError('host')\n", "MemoryError"),
    ],
)
def test_other_user_errors_are_named(lab: Lab, text: str, kind: str) -> None:
    _, report = run(lab, text)
    assert report["error"]["type"] == kind
    assert report["oom"] is (kind == "MemoryError")


def test_exit_codes_and_signals_pass_through(lab: Lab) -> None:
    assert run(lab, "import sys; sys.exit(7)")[1]["exit_codes"] == [7]
    assert run(lab, "import sys; sys.exit('because')")[1]["exit_codes"] == [1]
    report = run(lab, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")[1]
    assert report["exit_codes"] == [-signal.SIGSEGV] and report["killed"] is None


def test_a_module_and_a_python_command_are_warm_too(lab: Lab) -> None:
    lab.script("import sys; print('MOD', __name__, __package__, sys.argv[1:], __spec__.name)", "pkg/__main__.py")
    lab.script("", "pkg/__init__.py")
    module = lab.run("pkg", kind="module", argv=["--x"])
    assert lab.server.exit_of(module)["exit_codes"] == [0]
    assert "MOD __main__ pkg ['--x'] pkg.__main__" in lab.log(module)
    lab.script("import sys; print('CMD', sys.argv)", "cmd.py")
    command = lab.run("python", kind="command", argv=["cmd.py", "--a"])
    assert lab.server.exit_of(command)["exit_codes"] == [0]
    assert "CMD ['cmd.py', '--a']" in lab.log(command)
    for attempt_id in (module, command):
        assert lab.server.events(attempt_id, "started")[0]["data"]["warm"] is True
    missing = lab.run("no_such_module", kind="module")
    assert lab.server.exit_of(missing)["error"]["type"] == "ModuleNotFoundError"


def test_a_folder_that_hides_a_loaded_module_starts_cold(lab: Lab) -> None:
    lab.script("print('MINE')", "hiding/queue.py")
    attempt_id, report = run(lab, "import queue\nprint(__name__)\n", "hiding/train.py")
    assert report["exit_codes"] == [0]
    assert lab.log(attempt_id).splitlines() == ["MINE", "__main__"]
    assert lab.server.events(attempt_id, "started")[0]["data"]["warm"] is False


def test_names_and_values_of_params_never_reach_a_shell(lab: Lab) -> None:
    nasty = {"; touch PWNED #": "$(touch PWNED)", "a b": "`touch PWNED`", "q'\"": "x\ny", "-": "--flag"}
    for style in ("flags", "hydra", "json", "env"):
        lab.script("import sys, json; print(json.dumps(sys.argv[1:]))", "echo.py")
        attempt_id = lab.run(
            sys.executable, kind="command", argv=["-B", "echo.py"], params=nasty, args=style, preload=False
        )
        assert lab.server.exit_of(attempt_id)["exit_codes"] == [0], lab.log(attempt_id)
        words = json.loads(lab.log(attempt_id))
        assert bool(words) is (style != "env")
    assert not list(lab.code.rglob("PWNED*"))


def test_a_command_that_does_not_exist_says_so(lab: Lab) -> None:
    attempt_id = lab.run("no-such-program", kind="command", args="none")
    report = lab.server.exit_of(attempt_id)
    assert report["exit_codes"] == [127]
    assert report["error"]["type"] == "FileNotFoundError" and "no-such-program" in report["error"]["message"]


def test_launches_that_cannot_be_made_are_reported(lab: Lab) -> None:
    cases = {
        lab.run("missing.py"): "there is no script 'missing.py'",
        lab.run("train.py", cwd="/nowhere"): "working directory /nowhere does not exist",
        lab.run("train.py", python="/nowhere/python"): "there is no interpreter /nowhere/python",
    }
    for attempt_id, words in cases.items():
        failed = wait_for(lambda a=attempt_id: next((f for f in lab.server.failed if f["attempt_id"] == a), None))
        assert failed["user"] is True and words in failed["message"]
        assert lab.alive(attempt_id) == []


def test_an_old_python_is_refused_in_words(lab: Lab, tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    lab.script("print(1)")
    attempt_id = lab.run("train.py", python=str(old))
    failed = wait_for(lambda: next((f for f in lab.server.failed if f["attempt_id"] == attempt_id), None))
    assert failed["type"] == "PythonTooOld" and "Python 3.9" in failed["message"] and failed["user"] is True


def test_the_snapshot_is_copied_fresh_with_links(lab: Lab) -> None:
    snapshot, data = lab.root / "code" / ("a" * 32), lab.root / "bigdata"
    snapshot.mkdir(parents=True)
    data.mkdir()
    (data / "x.txt").write_text("linked")
    (snapshot / "train.py").write_text(
        "import os\nprint(open('data/x.txt').read(), os.path.islink('data'))\nopen('written','w').close()\n"
    )
    fields = {"cwd": str(snapshot), "code": "a" * 32, "code_links": {"data": str(data)}}
    attempt_id = lab.run("train.py", **fields)
    assert lab.server.exit_of(attempt_id)["exit_codes"] == [0], lab.log(attempt_id)
    assert lab.log(attempt_id).strip() == "linked True"
    assert (lab.folder(attempt_id) / "code" / "written").exists() and not (snapshot / "written").exists()
    assert not list(lab.folder(attempt_id).rglob("__pycache__"))


@pytest.mark.parametrize("source", ["json", "pattern"])
def test_the_objective_is_read_from_output(lab: Lab, source: str) -> None:
    text = """
print('noise {"val": }')
print('{"val": 0.5, "step": 3}'); print("val=0.5 at 3")
print('{"val": NaN, "step": 4}'); print("val=nan at 4")
print('{"val": 0.25, "step": 5}', end=""); print("\\nval=0.25 at 5", end="")
"""
    pattern = r"val=(?P<value>\S+) at (?P<step>\d+)"
    objective = {"metric": "val", "mode": "min", "reduce": "best", "source": source, "evaluator": None}
    attempt_id, _ = run(lab, text, objective={**objective, "pattern": pattern if source == "pattern" else None})
    reports = [(e["data"]["step"], e["data"]["values"]["val"]) for e in lab.server.events(attempt_id, "report")]
    assert reports == [(3, 0.5), (4, "nan"), (5, 0.25)]


def test_ranks_hear_a_directive_within_milliseconds_and_leave(lab: Lab) -> None:
    text = (
        LINE
        + """
print(call("POST", "/v1/hello", {"rank": 0, "pid": os.getpid(), "trainer": True}), flush=True)
call("POST", "/v1/push", {"rank": 0, "step": 3, "phase": "train", "metrics": [["loss", 3, 0.5, time.time()]],
    "ledger": {"seconds": {"productive": 1.5}, "counts": {"updates": 3}}})
call("POST", "/v1/push", {"rank": 0, "metrics": [["loss", 4, "nan", time.time()], ["loss", 5, float("inf"), 1.0]]})
print(call("POST", "/v1/push", {"rank": 0, "metrics": [["loss", "x", 1, 1]]})[0], flush=True)
directive = call("GET", "/v1/directive?after=0&wait=20")[1]
print("HEARD", time.time(), flush=True)
call("POST", "/v1/checkpoint", {"rank": 0, "step": 5, "uri": "/c/step-5", "bytes": 10})
call("POST", "/v1/leaving", {"rank": 0, "why": directive["action"], "saved": True, "step": 5})
os._exit(75)
"""
    )
    lab.script(text)
    attempt_id = lab.run("train.py")
    wait_for(lambda: "400" in lab.log(attempt_id))
    told_at = time.time()
    lab.server.tell(attempt_id, "yield", 10.0, "preempted")
    report = lab.server.exit_of(attempt_id)
    heard_at = float(re.search(r"HEARD (\S+)", lab.log(attempt_id))[1])  # type: ignore[index]
    assert heard_at - told_at < 0.5
    assert (report["left"], report["saved"], report["exit_codes"], report["killed"]) == ("yield", True, [75], None)
    assert report["directive"]["reason"] == "preempted"
    rows = [row[:3] for event in lab.server.events(attempt_id, "metrics") for row in event["data"]["rows"]]
    assert rows == [["loss", 3, 0.5], ["loss", 4, "nan"], ["loss", 5, "inf"]]
    assert lab.server.events(attempt_id, "ledger")[0]["data"]["seconds"] == {"productive": 1.5}
    assert lab.server.events(attempt_id, "checkpoint")[0]["data"]["uri"] == "/c/step-5"
    assert lab.server.events(attempt_id, "progress")[0]["data"] == {"step": 3, "phase": "train"}


def test_a_command_resumes_by_its_signal_and_exit_code(lab: Lab) -> None:
    text = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(42))\nprint('up', flush=True)\n"
    lab.script(text + "while True: time.sleep(0.01)\n")
    attempt_id = lab.run("train.py", resume={"signal": "USR1", "exit_code": 42})
    wait_for(lambda: "up" in lab.log(attempt_id))
    lab.server.tell(attempt_id, "yield", 10.0)
    report = lab.server.exit_of(attempt_id)
    assert (report["left"], report["exit_codes"], report["killed"], report["error"]) == ("yield", [42], None, None)


def test_a_stop_ends_a_script_that_does_not_listen(lab: Lab) -> None:
    attempt_id = lab.run(lab.script("import time; print('up', flush=True)\nwhile True: time.sleep(0.01)\n"))
    wait_for(lambda: "up" in lab.log(attempt_id))
    lab.server.tell(attempt_id, "stop", 30.0, "cancelled")
    report = lab.server.exit_of(attempt_id, 10)
    assert (report["exit_codes"], report["killed"], report["left"]) == ([-signal.SIGTERM], "grace", None)


def test_the_time_limit_stops(lab: Lab) -> None:
    attempt_id = lab.run(lab.script("import time\nwhile True: time.sleep(0.01)\n"), max_seconds=1.0)
    report = lab.server.exit_of(attempt_id, 15)
    assert report["directive"]["reason"] == "max_time" and report["killed"] == "grace"


def test_a_dead_peer_ends_the_gang(lab: Lab) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('rank one')\nwhile True: time.sleep(0.01)\n"
    lab.script(text)
    attempt_id = lab.run("train.py", num_ranks=2)
    report = lab.server.exit_of(attempt_id, 15)
    assert report["exit_codes"] == [-signal.SIGTERM, 1]
    assert (report["killed"], report["failed_rank"], report["error"]["message"]) == ("peer_failed", 1, "rank one")


def test_a_stale_attempt_stops_itself(lab: Lab) -> None:
    attempt_id = lab.run(lab.script("import time; print('up', flush=True)\nwhile True: time.sleep(0.01)\n"))
    wait_for(lambda: "up" in lab.log(attempt_id))
    lab.server.stale.add(attempt_id)
    lab.server.wait_ended(attempt_id)
    assert json.loads((lab.folder(attempt_id) / "exit.json").read_text())["killed"] == "stale"
    assert lab.server.events(attempt_id, "exit") == []
    assert lab.alive(attempt_id) == []


def test_a_changed_package_makes_the_warm_process_leave(fresh: Lab) -> None:
    extra = fresh.root / "extra" / "site-packages"
    extra.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(extra)}
    fresh.daemon()
    fresh.script("import thing; print(thing.version)")
    (extra / "thing.py").write_text("version = 1")
    first = fresh.run("train.py", env=env)
    assert fresh.server.exit_of(first, 60)["exit_codes"] == [0]
    (extra / "thing-2.dist-info").mkdir()
    (extra / "thing.py").write_text("version = 2222")
    second = fresh.run("train.py", env=env)
    assert fresh.server.exit_of(second, 60)["exit_codes"] == [0]
    assert fresh.log(second).strip() == "2222"
    warm = [fresh.server.events(one, "started")[0]["data"]["warm"] for one in (first, second)]
    assert warm == [True, False]


def test_an_interpreter_without_torch_is_warm_and_names_what_is_missing(fresh: Lab, tmp_path: Path) -> None:
    fresh.daemon()
    fresh.script("import sys; print(sys.prefix); import overnight; import torch\n")
    attempt_id = fresh.run("train.py")
    report = fresh.server.exit_of(attempt_id, 30)
    assert fresh.server.events(attempt_id, "started")[0]["data"]["warm"] is True
    assert str(tmp_path / "venv") in fresh.log(attempt_id)
    assert (report["error"]["type"], report["error"]["message"]) == ("ModuleNotFoundError", "No module named 'torch'")
    cold = fresh.run("train.py", preload=False)
    assert fresh.server.exit_of(cold, 30)["error"]["message"] == "No module named 'torch'"

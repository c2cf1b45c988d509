"""Pools: what they find, what they hide, and when a device is clean."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overnight.core.errors import InvalidSpecError, SetupError
from overnight.core.models.node import DeviceReport
from overnight.core.paths import Home
from overnight.platform.pools import Pool, open_pool
from overnight.platform.pools.nvml import _OwnProcesses, _short_type
from overnight.testing.clock import FakeClock
from overnight.testing.faults import FaultScript


@pytest.fixture
def pool(overnight_home: Home, overnight_clock: FakeClock) -> Pool:
    return open_pool("fake:4", overnight_home, overnight_clock)


def faults(pool: Pool) -> list[tuple[str | None, str | None, bool]]:
    return [(report.fatal, report.soft, report.busy) for report in pool.probe()]


OK = (None, None, False)


@pytest.mark.parametrize(
    "spec", ["", "cpu", "cpu:0", "cpu:x", "fake:", "fake:-1", "fake:99999", "gpu:1", "nvml:", "nvml:3-1", "nvml:a"]
)
def test_a_spec_that_is_none_is_refused(spec: str, overnight_home: Home) -> None:
    with pytest.raises(InvalidSpecError):
        open_pool(spec, overnight_home)


def test_cpu_slots(overnight_home: Home) -> None:
    pool = open_pool("cpu:3", overnight_home)
    reports = pool.probe()
    assert [(r.index, r.kind, r.fatal, r.busy) for r in reports] == [(i, "cpu", None, False) for i in range(3)]
    assert all(r.memory_bytes > 0 for r in reports)
    assert pool.visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert pool.describe() == "3 CPU slots"


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_gpus_the_default_is_a_slot_per_core(overnight_home: Home) -> None:
    assert len(open_pool(None, overnight_home).probe()) == len(os.sched_getaffinity(0))
    with pytest.raises(SetupError) as caught:
        open_pool("nvml", overnight_home)
    assert caught.value.hint


def test_fake_gpus(pool: Pool) -> None:
    report = pool.probe()[2]
    assert (report.index, report.kind, report.type, report.memory_bytes) == (2, "fake", "fake-gpu", 80 * 2**30)
    assert faults(pool) == [OK] * 4


def test_a_fault_begins_and_ends_when_the_script_says(
    pool: Pool, overnight_faults: FaultScript, overnight_clock: FakeClock
) -> None:
    overnight_faults.fail(2, cause="xid_79", after_seconds=3, clear_after_seconds=10)
    overnight_faults.fail(1, cause="xid_13", after_seconds=5)
    overnight_faults.fail(0, cause="busy")
    assert faults(pool) == [(None, None, True), OK, OK, OK]
    overnight_clock.advance(3)
    assert faults(pool)[2] == ("xid_79", None, False)
    overnight_clock.advance(2)
    assert faults(pool)[1] == (None, "xid_13", False)
    overnight_clock.advance(8)
    assert faults(pool)[2] == OK
    overnight_faults.clear(0)
    overnight_faults.clear(1)
    assert faults(pool) == [OK] * 4


def test_a_clear_ends_what_has_begun_not_what_is_to_come(
    pool: Pool, overnight_faults: FaultScript, overnight_clock: FakeClock
) -> None:
    overnight_faults.fail(3, cause="xid_48")
    overnight_faults.fail(3, cause="xid_79", after_seconds=60)
    overnight_clock.advance(1)
    overnight_faults.clear(3)
    assert faults(pool)[3] == OK
    overnight_clock.advance(60)
    assert faults(pool)[3] == ("xid_79", None, False)


def test_lines_written_by_hand(pool: Pool, overnight_home: Home, overnight_clock: FakeClock) -> None:
    file = overnight_home.faults_file
    file.write_text('{"device": 0, "cause": "xid_79", "after_seconds": 2}\n\nnonsense\n{"device": 1}\n[]\n')
    assert faults(pool) == [OK] * 4
    assert [line.split(":")[0] for line in pool.probe()[0].evidence["bad_lines"]] == ["line 3", "line 4", "line 5"]
    overnight_clock.advance(2)
    assert faults(pool)[0] == ("xid_79", None, False)


def test_half_a_line_is_left_for_later(pool: Pool, overnight_home: Home) -> None:
    line = json.dumps({"device": 0, "cause": "xid_79"})
    overnight_home.faults_file.write_text(line[:10])
    assert faults(pool) == [OK] * 4
    with overnight_home.faults_file.open("a") as file:
        file.write(line[10:] + "\n")
    assert faults(pool)[0] == ("xid_79", None, False)
    assert "bad_lines" not in pool.probe()[0].evidence


def test_a_file_that_starts_anew_is_read_anew(pool: Pool, overnight_home: Home, overnight_faults: FaultScript) -> None:
    overnight_faults.fail(0, cause="xid_79", clear_after_seconds=1000)
    assert faults(pool)[0][0] == "xid_79"
    overnight_home.faults_file.unlink()
    assert faults(pool) == [OK] * 4
    overnight_faults.fail(1, cause="xid_48")
    assert faults(pool) == [OK, ("xid_48", None, False), OK, OK]


@pytest.mark.parametrize("spec", ["cpu:1", "fake:1"])
def test_a_device_is_clean_when_its_processes_are_gone(spec: str, overnight_home: Home) -> None:
    pool = open_pool(spec, overnight_home)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not pool.is_clean(0, [process.pid])
        assert pool.is_clean(0, [])
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pool.is_clean(0, [process.pid]), "a zombie holds nothing"
    assert pool.is_clean(0, [process.pid])


def test_our_processes_are_known_by_their_ancestors(overnight_home: Home) -> None:
    is_ours = _OwnProcesses(overnight_home)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(0, flush=True); input()'], env={})"
    marked = {"OVERNIGHT_HOME": str(overnight_home.root)}
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        [grandchild] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert is_ours(int(grandchild)), "its own environment is empty, its parent's is not"
        assert is_ours.of_attempt(int(grandchild), {process.pid})
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert not is_ours(os.getpid())


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA", "gpu"),
    ],
)
def test_short_types(name: str, short: str) -> None:
    assert _short_type(name) == short


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="this machine has no GPU")
def test_nvml(overnight_home: Home) -> None:
    pool = open_pool("nvml", overnight_home)
    reports = pool.probe()
    assert reports and all(isinstance(report, DeviceReport) for report in reports)
    first = reports[0]
    assert first.memory_bytes > 2**30 and first.uuid.startswith("GPU-") and first.type != "unknown"
    assert pool.visible([first.index]) == {"CUDA_VISIBLE_DEVICES": first.uuid}
    assert pool.is_clean(first.index, [os.getpid()])


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, overnight.testing.plugin as p; print(sorted(m for m in sys.modules if m.startswith('overnight')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(loaded.replace("'", '"')) == ["overnight", "overnight.testing", "overnight.testing.plugin"]

"""Worker processes: the same bits, deaf to signals, never stuck, never left behind."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overnight.core.errors import DataError, DatasetChangedError
from overnight.trainer.data import workers
from overnight.trainer.data.loader import DataLoader

DEADLINE_SECONDS = 20.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def child_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


class Dataset:
    """Each sample says who read it; sample ``stuck`` is never finished."""

    def __init__(self, length: int, stuck: int = -1, offset: int = 0) -> None:
        self.length = length
        self.stuck = stuck
        self.offset = offset
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        if index == self.stuck:
            threading.Event().wait()
        noise = [random.random(), random.gauss(0, 1), np.random.normal(), float(torch.randn(()))]
        return {"index": index + self.offset, "noise": torch.tensor(noise, dtype=torch.float64)}


class Who(Dataset):
    def __getitem__(self, index: int) -> Any:
        ignored = [
            signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        ]
        return {"index": index, "pid": os.getpid(), "deaf": ignored, "masked": len(signal.pthread_sigmask(0, []))}


def rows(loader: DataLoader) -> list[list[float]]:
    return [[*batch["index"].tolist(), *batch["noise"].ravel().tolist()] for batch in loader]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"weights": range(1, 24)}])
def test_any_number_of_workers_gives_the_same_bits(options: dict[str, Any]) -> None:
    expected = None
    for num_workers in (0, 1, 2):
        loader = DataLoader(Dataset(23), batch_size=4, num_workers=num_workers, seed=1, **options)
        got = [rows(loader) for _ in range(2)]
        assert expected is None or got == expected
        expected = got
    assert not child_pids()


def test_workers_ignore_signals_and_block_none() -> None:
    loader = DataLoader(Who(8), batch_size=2, num_workers=2)
    for batch in loader:
        assert all(flag.all() for flag in batch["deaf"])
        assert batch["masked"].tolist() == [0, 0]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_signal_to_the_workers_does_not_disturb_the_loop() -> None:
    loader = DataLoader(Who(40), batch_size=2, num_workers=2)
    seen: list[int] = []
    for batch in loader:
        seen += batch["index"].tolist()
        for pid in child_pids():
            for number in SIGNALS:
                os.kill(pid, number)
    assert seen == list(range(40))


def test_reading_ahead_does_not_move_the_position() -> None:
    loader = DataLoader(Dataset(40), batch_size=2, num_workers=2)
    for number, _ in enumerate(loader):
        assert loader.position == 2 * number
    assert (loader.epoch, loader.position) == (1, 0)


def test_a_killed_worker_is_an_error_with_a_way_out() -> None:
    loader = DataLoader(Dataset(6, stuck=2), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)
    (pid,) = child_pids()
    threading.Timer(0.1, os.kill, [pid, signal.SIGKILL]).start()
    with pytest.raises(DataError, match="loader worker did not answer") as caught:
        next(batches)
    assert "num_workers=0" in caught.value.hint
    assert not child_pids()
    loader.dataset.stuck = -1
    assert len(rows(loader)) == 3


def test_a_silent_worker_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CLOSE_GRACE_SECONDS", 0.1)
    with pytest.raises(DataError, match="timed out"):
        rows(DataLoader(Dataset(6, stuck=0), batch_size=2, num_workers=1, timeout=0.3))
    assert not child_pids()


def test_an_error_in_a_worker_names_the_sample() -> None:
    class Broken(Dataset):
        def __getitem__(self, index: int) -> Any:
            raise LookupError("no such file")

    with pytest.raises(LookupError, match=r"(?s)no such file.*while reading sample 0 of Broken"):
        list(DataLoader(Broken(4), batch_size=2, num_workers=1))


def test_leaving_early_kills_a_stuck_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CLOSE_GRACE_SECONDS", 0.2)
    for _ in DataLoader(Dataset(20, stuck=5), batch_size=2, num_workers=2):
        pids = child_pids()
        break
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not child_pids()


def test_persistent_workers_stay_until_closed() -> None:
    loader = DataLoader(Who(12), batch_size=2, num_workers=2, persistent_workers=True)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    pids = child_pids()
    assert len(pids) == 2
    for _ in range(2):
        batches = list(loader)
        assert [index for batch in batches for index in batch["index"].tolist()] == list(range(12))
        assert {pid for batch in batches for pid in batch["pid"].tolist()} == pids
    loader.close()
    assert not child_pids()


def test_the_users_worker_init_runs() -> None:
    class Marked(Who):
        def __getitem__(self, index: int) -> Any:
            return int(os.environ.get("MARKED_WORKER", "-1"))

    def mark(worker_id: int) -> None:
        os.environ["MARKED_WORKER"] = str(worker_id)

    loader = DataLoader(Marked(4), batch_size=2, num_workers=2, worker_init_fn=mark)
    assert [batch.tolist() for batch in loader] == [[0, 0], [1, 1]]


def test_the_content_is_compared_in_a_worker_before_the_first_batch() -> None:
    dataset = Dataset(12)
    source = DataLoader(dataset, batch_size=2, num_workers=1)
    assert source.state_dict()["fingerprint"] is None
    batches: Any = iter(source)
    next(batches), next(batches)
    state = source.state_dict()
    assert dataset.num_reads == 0, "the data set was read in the process that forks"
    assert state["fingerprint"] == DataLoader(dataset, batch_size=2).state_dict()["fingerprint"]
    batches.close()
    same = DataLoader(Dataset(12), batch_size=2, num_workers=1)
    same.load_state_dict(state)
    assert next(iter(same))["index"].tolist() == [2, 3]
    changed = DataLoader(Dataset(12, offset=1), batch_size=2, num_workers=1)
    changed.load_state_dict(state)
    with pytest.raises(DatasetChangedError, match="content of the data set"):
        next(iter(changed))
    assert not child_pids()


SCRIPT = """
import os, random, sys, threading
import numpy as np
import torch
from overnight.trainer.data.loader import DataLoader

class Dataset:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == int(sys.argv[2]):
            threading.Event().wait()
        return {"pid": os.getpid(), "noise": torch.tensor([random.random(), np.random.normal(), float(torch.rand(()))])}

def batches(method):
    num_workers = 0 if method is None else 1
    return iter(DataLoader(Dataset(), batch_size=2, num_workers=num_workers, multiprocessing_context=method))

if __name__ == "__main__":
    if sys.argv[3] == "compare":
        read = [[batch["noise"].tolist() for batch in batches(method)] for method in (None, "fork", "forkserver")]
        print(len(read[0]), read[0] == read[1] == read[2])
        raise SystemExit
    stuck = batches(sys.argv[1])
    print(int(next(stuck)["pid"][0]), int(next(stuck)["pid"][0]), flush=True)
    if sys.argv[3] == "wait":
        threading.Event().wait()
    raise SystemExit(3)
"""


def command(folder: Path, method: str, stuck: int, what: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script), method, str(stuck), what]


def test_every_start_method_gives_the_same_bits(tmp_path: Path) -> None:
    finished = subprocess.run(command(tmp_path, "", -1, "compare"), check=True, capture_output=True, text=True)
    assert finished.stdout == "8 True\n"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_die_with_a_killed_parent(tmp_path: Path, method: str) -> None:
    with subprocess.Popen(command(tmp_path, method, 5, "wait"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids
        assert all(is_alive(pid) for pid in pids)
        process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_the_interpreter_leaves_although_a_worker_is_stuck(tmp_path: Path) -> None:
    finished = subprocess.run(command(tmp_path, "fork", 5, "leave"), capture_output=True, text=True, timeout=40)
    assert finished.returncode == 3, finished.stderr
    assert not any(is_alive(int(pid)) for pid in finished.stdout.split())

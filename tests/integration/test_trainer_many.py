"""States at the edge, through whole runs: a hundred thousand tensors, and gradients that each rank has for itself."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from trainer_ranks import Lab, shared_lab

from overnight import trainer
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.reading.finding import open_newest

BOUND_SECONDS = 120.0
"""On a busy machine; a quiet one needs a tenth of it."""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in list(os.environ):
        if name.startswith("OVERNIGHT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


def many(num_tensors: int) -> dict[str, torch.Tensor]:
    """Views of one memory, of one to three elements, all different."""
    flat = torch.arange(3.0 * num_tensors)
    return {f"layer.{n}": flat[3 * n : 3 * n + 1 + n % 3] for n in range(num_tensors)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_tensors", [5_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_small_tensors_through_a_run_and_back(alone: None, num_tensors: int) -> None:
    began = time.monotonic()
    table = many(num_tensors)
    with trainer.run(every=None) as run:
        run.track(table=table)
        for step in run.steps(2):
            torch._foreach_add_(list(table.values()), 0.5)
            if step == 1:
                run.save()
    place = LocalPlace(run.trial_dir / "checkpoints")
    first, final = sorted(place.checkpoints())
    assert (first.step, final.step) == (1, 2)
    restored = open_newest(place)
    assert restored is not None and restored.manifest.step == 2
    found = restored.state("table")
    assert found.keys() == table.keys()
    assert [key for key, tensor in table.items() if not torch.equal(found[key], tensor)] == []

    reader = FileSystemReader(place.path(first))
    assert len(reader.read_metadata().state_dict_metadata) >= num_tensors
    some = {f"table.{key}": torch.zeros_like(table[key]) for key in list(table)[::997]}
    load(some, storage_reader=reader)
    assert [key for key, tensor in some.items() if not torch.equal(tensor + 0.5, table[key[6:]])] == []
    assert time.monotonic() - began < BOUND_SECONDS


SCRIPT = """
import contextlib, json, os, signal
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from overnight import trainer

WAY, AT = os.environ["WAY"], os.environ.get("AT")

with trainer.run(every=None, seed=3) as run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model = fully_shard(net) if WAY.startswith("sharded") else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run.track(net=net, optimizer=optimizer)

    def whole(value):
        return getattr(value, "full_tensor", lambda: value)().detach()

    for step in run.steps(9):
        updates = step % 3 == 0
        if WAY == "sharded, no sync":
            model.set_requires_gradient_sync(updates)
        waits = contextlib.nullcontext() if updates or WAY != "no sync" else model.no_sync()
        with waits:
            inputs = torch.linspace(-1, 1, 12).view(2, 6).roll(step + 5 * run.rank, 1)
            model(inputs).square().mean().backward()
        if WAY == "no sync" and not updates:
            own = net[0].weight.grad.clone()
            other = [torch.empty_like(own) for _ in range(run.world_size)]
            torch.distributed.all_gather(other, own)
            assert not any(torch.equal(other[0], one) for one in other[1:]), "each rank has its own"
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        if str(step) == AT and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    values = {key: whole(value).flatten().tolist() for key, value in net.state_dict().items()}
    (run.trial_dir / f"end-{run.rank}.json").write_text(json.dumps(values))
"""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def ends(lab: Lab, folder: Path, way: str, *stops: str, ranks: int = 2) -> list[Any]:
    """What each rank has at the end, after it was told to leave at some steps."""
    folder.mkdir()
    script = folder / "rounds.py"
    script.write_text(SCRIPT)
    for stop in stops:
        codes = lab.run(script, folder, ranks=ranks, env={"WAY": way, "AT": stop})
        assert codes == [75] * ranks, (folder / "log").read_text()[-4000:]
    assert lab.run(script, folder, ranks=ranks, env={"WAY": way}) == [0] * ranks, (folder / "log").read_text()[-4000:]
    (trial,) = (folder / ".overnight" / "rounds").iterdir()
    return [json.loads((trial / f"end-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("way", ["no sync", "sharded", "sharded, no sync"])
def test_a_gang_that_leaves_in_the_middle_of_an_accumulation_keeps_each_rank_s_gradients(
    lab: Lab, tmp_path: Path, way: str
) -> None:
    """C14."""
    undisturbed = ends(lab, tmp_path / "undisturbed", way)
    assert ends(lab, tmp_path / "disturbed", way, "1", "5") == undisturbed


def test_three_ranks_that_leave_in_the_middle_of_an_accumulation_keep_their_gradients(lab: Lab, tmp_path: Path) -> None:
    """C14. Parameters do not divide by three, and sums of three have other last bits in another order.

    They leave one update after the signal, with the gradients of two.
    """
    undisturbed = ends(lab, tmp_path / "undisturbed", "sharded, no sync", ranks=3)
    assert ends(lab, tmp_path / "disturbed", "sharded, no sync", "4", ranks=3) == undisturbed


TENSOR_PARALLEL = """
import os, signal
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from overnight import trainer

with trainer.run(every=None, seed=3) as run:
    torch.manual_seed(0)
    mesh = run.mesh(dp=2, tp=2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    run.track(net=net, optimizer=optimizer)
    for step in run.steps(9):
        updates = step % 3 == 0
        model.set_requires_gradient_sync(updates)
        model(torch.linspace(-1, 1, 8).view(2, 4).roll(step + 5 * (run.rank // 2), 1)).square().mean().backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            run.save()
        if str(step) == os.environ.get("AT") and run.rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    (run.trial_dir / f"end-{run.rank}.json").write_text('"' + run.fingerprint() + '"')
"""


def test_gradients_that_wait_under_tensor_parallelism_are_waited_for_and_never_left_out(
    lab: Lab, tmp_path: Path
) -> None:
    """A save waits for the step that uses them; who must leave before that says so, and goes on from before them."""
    script = tmp_path / "tensor_parallel.py"
    script.write_text(TENSOR_PARALLEL)

    def run(folder: str, codes: int, at: str = "") -> tuple[str, list[Any]]:
        assert lab.run(script, tmp_path / folder, ranks=4, env={"AT": at}) == [codes] * 4
        (trial,) = (tmp_path / folder / ".overnight" / "tensor_parallel").iterdir()
        ends = [json.loads(path.read_text()) for path in sorted(trial.glob("end-*.json"))]
        return (tmp_path / folder / "log").read_text(), ends

    _, undisturbed = run("undisturbed", 0)
    log, ends = run("disturbed", 75, at="4")
    assert ends == [] and log.count("leaving without a save: gradients that wait for") == 4, log[-3000:]
    log, ends = run("disturbed", 0)
    assert "resumed at step 3" in log and ends == undisturbed and len(ends) == 4, log[-3000:]

"""Sharded training (FSDP2) goes on at as many ranks with the same bits, at any other number with the same values."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from trainer_ranks import Lab, shared_lab

SCRIPT = Path(__file__).with_name("trainer_sharded.py")
LEAVES_AT, UPDATES = "4", 7


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def trial_of(folder: Path) -> Path:
    (trial,) = (folder / ".overnight" / "trainer_sharded").iterdir()
    return trial


def values(folder: Path, name: str = "values") -> dict[str, Any]:
    result: dict[str, Any] = json.loads((trial_of(folder) / f"{name}.json").read_text())
    return result


def draws(folder: Path) -> list[list[str]]:
    """By rank, what its own generator gave: a line for each update that was ever computed."""
    return [path.read_text().splitlines() for path in sorted(trial_of(folder).glob("draws-*.jsonl"))]


def run(lab: Lab, folder: Path, ranks: int, *, leave: bool = False, build: str = "") -> None:
    env = {"BUILD": build, **({"LEAVE": LEAVES_AT} if leave else {})}
    expected = [75] * ranks if leave else [0] * ranks
    assert lab.run(SCRIPT, folder, ranks=ranks, env=env) == expected, (folder / "log").read_text()[-4000:]


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    keys = [key for key in one if not key.endswith("seen")]  # counts micro-batches, of which each rank has its share
    pairs = [(torch.tensor(one[key]), torch.tensor(other[key])) for key in keys]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            done[ranks] = tmp_path_factory.mktemp("undisturbed")
            run(lab, done[ranks], ranks)
        return done[ranks]

    return get


@pytest.fixture(scope="module")
def left(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copies what a run on so many ranks had left when it was told to."""
    done: dict[int, Path] = {}

    def copy(ranks: int, folder: Path) -> dict[str, Any]:
        if ranks not in done:
            done[ranks] = tmp_path_factory.mktemp("left")
            run(lab, done[ranks], ranks, leave=True)
        shutil.copytree(done[ranks], folder, dirs_exist_ok=True)
        return values(folder)

    return copy


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_number_of_ranks_ends_with_the_same_bits(
    lab: Lab, undisturbed: Any, left: Any, tmp_path: Path, ranks: int
) -> None:
    at_save = left(ranks, tmp_path)
    reference = undisturbed(ranks)
    assert at_save["step"] < UPDATES == values(reference)["step"]
    run(lab, tmp_path, ranks)
    assert values(tmp_path, f"resumed-{ranks}") == at_save
    assert values(tmp_path) == values(reference)
    assert draws(tmp_path) == draws(reference), "each rank's own generator went on where it was"
    assert len({tuple(lines) for lines in draws(reference)}) == ranks, "no two of them draw the same"


@pytest.mark.parametrize("path", [(2, 1), (2, 3), (1, 2)])
def test_other_numbers_of_ranks_go_on_with_the_same_values(
    lab: Lab, undisturbed: Any, left: Any, tmp_path: Path, path: tuple[int, int]
) -> None:
    """One rank is a plain model, which is not sharded: so those two read each other's checkpoints as well."""
    saved, resumed = path
    at_save = left(saved, tmp_path)
    run(lab, tmp_path, resumed)
    assert values(tmp_path, f"resumed-{resumed}") == at_save, "every value, cut anew"
    assert close(values(tmp_path)["values"], values(undisturbed(saved))["values"])
    log = (tmp_path / "log").read_text()
    assert f"saved by {saved} rank(s), this run has {resumed}" in log
    assert ("'net' differed" not in log) and ("'optimizer' differed" not in log)
    streams = [
        {line[2] for line in map(json.loads, lines) if line[1] == resumed} for lines in draws(tmp_path)[:resumed]
    ]
    if saved == 1:
        assert streams[0] == streams[1] and "'generator' was saved by one rank" in log
    else:
        assert all(streams) and len(set.union(*streams)) == sum(map(len, streams)), "no two ranks draw the same"


def test_replicas_of_a_hybrid_sharding_are_written_once_and_stock_tools_read_them(lab: Lab, tmp_path: Path) -> None:
    run(lab, tmp_path, 4, leave=True, build="hybrid")
    at_save = values(tmp_path)
    (checkpoint, *_) = sorted((trial_of(tmp_path) / "checkpoints").glob("step-*"), reverse=True)
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for key in ("net.layers.0.weight", "optimizer.state.1.exp_avg", "ema.module.table.weight"):
        chunks: Any = stored[key].chunks  # type: ignore[union-attr]
        assert len({tuple(chunk.offsets) for chunk in chunks}) == len(chunks) == 2
        assert sum(chunk.sizes.numel() for chunk in chunks) == stored[key].size.numel()  # type: ignore[union-attr]
    dcp_to_torch_save(checkpoint, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert plain["net.layers.0.weight"].double().flatten().tolist() == at_save["values"]["layers.0.weight"]
    run(lab, tmp_path, 2)
    assert values(tmp_path, "resumed-2") == at_save


def test_fsdp_over_tensor_parallelism(lab: Lab, tmp_path: Path) -> None:
    script = SCRIPT.with_name("trainer_tensor_parallel.py")
    assert lab.run(script, tmp_path, ranks=4, env={"WIDTH": "8"}) == [0] * 4, (tmp_path / "log").read_text()[-4000:]
    assert lab.run(script, tmp_path, ranks=4, env={"WIDTH": "6"}) == [3] * 4, (tmp_path / "log").read_text()[-4000:]
    assert "net.0.weight: a DTensor (6, 6) is sharded 4 ways" in (tmp_path / "log").read_text()

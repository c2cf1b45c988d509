"""What a save costs training: time that it blocks, wall that it adds, disk, memory and bytes; and whether it is exact.

    python benchmarks/checkpoint.py [--json] [--quick]

Every figure of wall is taken in pairs: windows of updates with and without a save, in random order and each long enough
for the whole save, in one process with the peers. Bounds are upper 95 % bounds, by bootstrap over the pairs. Training
computes on one thread, as on a GPU host whose cores are free; ``save_wall_over_memcpy_busy`` lets it use every core.
What a peer has not finished when its window ends does not count against it: each row says what of the peer's does.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _checkpoint_parts import SIZES
from _paired import bounded, extra, extra_over, over_median, ratio_of_medians
from _report import Row, parser, publish

HERE = Path(__file__).resolve().parent
SOAK = HERE.parent / "tests" / "labs" / "soak_lab.py"
MIN_PAIRED_UPDATES = 100
TORCH_SAVE = "torch.save, its write to the page cache counts, the disk does not"
DCP_ASYNC = "stock dcp.async_save, its write counts as far as it slows the loop"
DCP_KEPT = "dcp.async_save, one DefaultStager kept; its write counts as far as it slows the loop"
COPY = "warm memcpy of the changed bytes, one thread; nothing is written"


def part(name: str, **options: Any) -> dict[str, Any]:
    """Measures one part in a process of its own."""
    command = [sys.executable, str(HERE / "_checkpoint_parts.py"), name, json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def needed_bytes(size: str) -> int:
    """Memory for a size: state, gradients, staging, a copy and the peers' own."""
    return 7 * SIZES[size].num_bytes


def fitting(names: list[str]) -> list[str]:
    """Sizes for which the memory is there."""
    return [name for name in names if needed_bytes(name) < free_bytes()]


def missing_row(size: str) -> Row:
    """Says that a size was left out."""
    unit = f"ms, {size}: left out, since {needed_bytes(size) >> 30} GiB of free memory are needed"
    return Row("save_blocks_ms", unit, None, None, TORCH_SAVE, "<= 5")


def blocks_row(size: str, found: dict[str, Any]) -> Row:
    """How long a save holds up the loop."""
    ours = [block["ours blocked"] - block["none blocked"] for block in found["blocks"]]
    peer = [block["torch_save blocked"] for block in found["blocks"] if "torch_save blocked" in block]
    value = round(1000 * max(0.0, statistics.median(ours)), 3)
    unit = f"ms, {size} in {8 * SIZES[size].layers} tensors"
    return Row(
        "save_blocks_ms", unit, value, round(1000 * statistics.median(peer), 3) if peer else None, TORCH_SAVE, "<= 5"
    )


def wall_rows(size: str, found: dict[str, Any]) -> list[Row]:
    """The extra wall of a save beside a copy and the peers."""
    blocks = found["blocks"]
    pairs = f"{len(blocks)} pairs of {found['num_updates']} updates"
    ours_ms = round(1000 * extra(blocks, "ours"), 3)
    copy_ms = round(1000 * statistics.median(block["memcpy"] for block in blocks), 3)
    over_copy = bounded(blocks, over_median("ours", "memcpy"))
    unit = f"x, upper bound, {size}, {pairs}; {ours_ms} ms over {copy_ms} ms"
    result = [Row("save_wall_over_memcpy", unit, round(over_copy.upper, 3), 1.0, COPY, "<= 2")]
    goals = {
        "torch_save": ("save_wall_over_torch_save", TORCH_SAVE, "<= 0.1"),
        "dcp_async": ("save_wall_over_dcp_async", DCP_ASYNC, "<= 0.33"),
        "dcp_async_kept": ("save_wall_over_dcp_async", DCP_KEPT, ""),
    }
    shared = [block for block in blocks if "torch_save" in block]
    for kind, (measure, name, goal) in goals.items() if shared else ():
        ratio = bounded(blocks, extra_over("ours", kind))
        unit = f"x, upper bound, {size}; {ours_ms} ms over {round(1000 * extra(shared, kind), 3)} ms"
        result.append(Row(measure, unit, round(ratio.upper, 4), 1.0, name, goal))
    return result


def busy_row(size: str, found: dict[str, Any]) -> Row:
    """The same over a copy, while training uses every core."""
    blocks = found["blocks"]
    ratio = bounded(blocks, over_median("ours", "memcpy"))
    unit = (
        f"x, upper bound, {size}, {len(blocks)} pairs of {found['num_updates']} updates; {ratio.value:.2f} in the mean"
    )
    return Row("save_wall_over_memcpy_busy", unit, round(ratio.upper, 3), 1.0, COPY, "<= 4")


def commit_row(size: str, pairs: int) -> Row:
    """From the call to the commit, over the disk."""
    found = part("commits", size=size, pairs=pairs)["blocks"]
    ratio = bounded(found, ratio_of_medians("ours", "disk"))
    seconds = [round(statistics.median(block[key] for block in found), 3) for key in ("ours", "disk")]
    unit = f"x, upper bound, {size}; {seconds[0]} s over {seconds[1]} s"
    name = "dd conv=fsync of as many bytes, the time until they are on the disk counts"
    return Row("commit_over_disk", unit, round(ratio.upper, 3), 1.0, name, "<= 1.5")


def memory_row(size: str) -> Row:
    """Staging memory."""
    first = part("staging", size=size)["staging"]
    return Row("staging_over_state", f"x state, {size}", round(first, 3), 1.0, "the state itself", "<= 1.05")


def growth_row(size: str, saves: int) -> Row:
    """The same after many saves: with the growth beyond that of the same training without saves."""
    first = part("staging", size=size)["staging"]
    saved, unsaved = (part("many", size=size, saves=saves, with_saves=one)["growth"] for one in (True, False))
    growth = f"{saved:+.4f} over {saves} saves less {unsaved:+.4f} over as many updates without, freed tensors unmapped"
    value = round(first + saved - unsaved, 3)
    return Row("staging_over_state", f"x state, {size}, with {growth}", value, 1.0, "the state itself", "<= 1.05")


def frozen_row(size: str) -> Row:
    """What is written of a state that is 99 % frozen."""
    found = part("frozen", size=size, saves=5)
    unit = f"of the state per save, {size}, 99 % frozen"
    name = "the first save, everything at the destination counts"
    share, first = round(statistics.fmean(found["shares"]), 4), round(found["first"], 4)
    return Row("frozen_bytes_share", unit, share, first, name, "<= 0.02")


def soak_rows(kills: int) -> list[Row]:
    """A short soak; ``make soak`` runs the long one."""
    command = [sys.executable, str(SOAK), "--kills", str(kills), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    found = json.loads(done.stdout)
    unit = f"seed {found['seed']}, {found['rounds']} trainings"
    name = "an undisturbed run"
    return [
        Row("soak_kills", unit, found["kills"], None, name, f">= {kills}"),
        Row("soak_mismatches", unit, found["mismatches"], 0, name, "== 0"),
    ]


def measure(quick: bool) -> list[Row]:
    """Everything."""
    wanted = ["64 MB"] if quick else ["64 MB", "256 MB", "1 GB", "2 GB"]
    sizes = fitting(wanted)
    pairs = {"64 MB": 40 if quick else 100, "256 MB": 60, "1 GB": 34, "2 GB": 6}
    result = [missing_row(size) for size in wanted if size not in sizes]
    for size in sizes:
        only_blocks = size == "2 GB"
        found = part("walls", size=size, pairs=pairs[size], peers_every=0 if only_blocks else 4, threads=1)
        result.append(blocks_row(size, found))
        if not only_blocks:
            assert len(found["blocks"]) * found["num_updates"] >= MIN_PAIRED_UPDATES
            result += wall_rows(size, found)
    for size in sizes[:2]:
        threads = os.cpu_count() or 1
        found = part("walls", size=size, pairs=pairs[size], peers_every=0, threads=threads)
        result.append(busy_row(size, found))
    for size in sizes[-3:-1] or sizes:
        result.append(commit_row(size, 10))
    result.append(memory_row(sizes[0] if quick else "256 MB"))
    result.append(growth_row("64 MB", 100 if quick else 1000))
    result.append(frozen_row("256 MB"))
    return result + soak_rows(10 if quick else 30)


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__ or "")
    options.add_argument("--quick", action="store_true", help="a small state and few pairs, in minutes")
    arguments = options.parse_args()
    publish("checkpoint", measure(arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()

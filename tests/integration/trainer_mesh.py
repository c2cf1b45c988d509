"""FSDP over tensor parallelism with a loader that knows the mesh; ``DP`` and ``TP`` are its sizes.

``DISTURB`` is JSON ``{"step", "rank", "signal"}``. Each rank appends what it was given to ``rank-<d>-<t>.jsonl``.
"""

import json
import os
import random

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overnight import trainer


class Noisy(torch.utils.data.Dataset):
    """Its samples are augmented anew each time."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8) + random.random()


def main() -> None:
    sizes = {"dp": int(os.environ["DP"]), "tp": int(os.environ["TP"])}
    disturb = json.loads(os.environ.get("DISTURB", "null"))
    with trainer.run(every=4, seed=5) as run:
        mesh = run.mesh(**sizes)
        assert run.mesh(**sizes) is mesh
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
        run.track(model=net, optimizer=optimizer)
        chosen = mesh["dp"] if os.environ.get("ONE_DIMENSION") else mesh
        loader = trainer.DataLoader(
            Noisy(),
            global_batch_size=8,
            micro_batch_size=2,
            shuffle=True,
            num_workers=int(os.environ.get("WORKERS", "0")),
            mesh=chosen,
        )
        name = "-".join(map(str, mesh.get_coordinate()))
        log = (run.trial_dir / f"rank-{name}.jsonl").open("a")
        for indices, inputs in run.batches(loader, epochs=2):
            drawn = torch.rand(()).item()  # as dropout would
            if disturb and (disturb["step"], disturb["rank"]) == (run.step, run.rank):
                os.kill(os.getpid(), disturb["signal"])
            (net(inputs).square().mean() / run.accumulate).backward()
            noise = inputs.double().sum().item().hex()
            log.write(json.dumps([run.step, indices.tolist(), noise, drawn]) + "\n")
            log.flush()
            run.log(samples=len(indices), reduce="sum")
            run.log(loss=inputs.mean())
            if run.update_now:
                optimizer.step()
                optimizer.zero_grad()
        run.report(samples=1, reduce="sum")
        run.report(rank=run.rank, reduce="max")


main()

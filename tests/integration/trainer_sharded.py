"""A model under ``fully_shard`` with AdamW, at any number of ranks; dropout is off, since it draws per rank.

``LEAVE`` is a step at which the script asks to be stopped; ``BUILD`` names how the model is spread.
"""

import copy
import json
import os
import signal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overnight import trainer

WIDTH = 7  # divides by no number of ranks, and is less than some


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(2))  # shorter than three ranks
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden * self.scale[0] + self.scale[1])


def spread(net: Net, world_size: int) -> Net:
    if world_size == 1 or os.environ.get("BUILD") == "plain":
        return net
    mesh = None
    if os.environ.get("BUILD") == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def report(name: str, run: trainer.Run, net: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module) -> None:
    """All values as text, which has every bit of a float."""
    values = {key: whole(value).detach() for key, value in net.state_dict().items()}
    values |= {f"ema.{key}": whole(value).detach() for key, value in ema.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"{number}.{key}": whole(value).detach() for key, value in state.items()}
    flat = {key: value.double().flatten().tolist() for key, value in sorted(values.items())}
    if run.rank == 0:
        (run.trial_dir / f"{name}.json").write_text(json.dumps({"step": run.step, "values": flat}))


def main() -> None:
    with trainer.run(defaults={"steps": 7}, every=3, seed=3) as run:
        torch.manual_seed(5)
        net = Net()
        ema = torch.optim.swa_utils.AveragedModel(copy.deepcopy(net) if run.world_size == 1 else net)
        net = spread(net, run.world_size)
        spread(ema.module, run.world_size)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=os.environ.get("BUILD") != "hybrid")
        generator = torch.Generator().manual_seed(run.rank)
        run.track(net=net, optimizer=optimizer, ema=ema, generator=generator)
        leaving = os.environ.get("LEAVE")
        if run.resumed:
            report(f"resumed-{run.world_size}", run, net, optimizer, ema)
        data = [torch.arange(3 * i, 3 * i + 4) % 11 for i in range(48)]
        loader = trainer.DataLoader(data, global_batch_size=12, micro_batch_size=1, shuffle=True)
        draws = (run.trial_dir / f"draws-{run.rank}.jsonl").open("a")
        for tokens in run.batches(loader, epochs=3):
            if run.step > run.params["steps"]:
                break
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()) / run.accumulate
            loss.backward()
            if not run.update_now:
                continue
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
            draws.write(json.dumps([run.step, run.world_size, torch.rand(1, generator=generator).item()]) + "\n")
            draws.flush()
            if str(run.step) == leaving and run.rank == run.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.step >= int(leaving or run.params["steps"]):
                report("values", run, net, optimizer, ema)


main()

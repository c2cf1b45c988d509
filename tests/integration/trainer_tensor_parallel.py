"""FSDP over tensor parallelism at four ranks: chunks of interleaved shards, put together and cut again."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.state import decode, encode
from overnight.trainer.checkpoint.tracked import fit_of, put_back, state_of

WIDTH = int(os.environ["WIDTH"])


def box(at, shape):
    return tuple(slice(start, start + length) for start, length in zip(at, shape, strict=True))


def build(mesh):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)


def step(net, optimizer, seed):
    torch.manual_seed(seed)
    net(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
first, second = build(mesh), build(mesh)
step(*first, 1)
try:
    encoded = encode({"net": state_of(first[0]), "optimizer": state_of(first[1])})
except SaveFailedError as refused:
    print(refused, flush=True)
    raise SystemExit(3) from None
everybody = [None] * 4
dist.all_gather_object(everybody, encoded.leaves)
whole = {}
for leaves in everybody:
    for key, leaf in leaves.items():
        if leaf.whole is None:
            whole[key] = leaf.tensor
        else:
            target = whole.setdefault(key, torch.full(leaf.whole, float("nan")))
            target[box(leaf.at, leaf.tensor.shape)] = leaf.tensor
for name, value in first[0].state_dict().items():
    assert torch.equal(whole[f"net.{name}"], value.full_tensor())


def read(key, chunk=None):
    return (whole[key] if chunk is None else whole[key][box(chunk.at, chunk.shape)]).clone()


for name, obj in (("net", second[0]), ("optimizer", second[1])):
    put_back(obj, decode(encoded.objects[name], read, None, fit_of(obj)))
for training in (first, second):
    step(*training, 2)
for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
    assert torch.equal(one.to_local(), other.to_local())
dist.destroy_process_group()

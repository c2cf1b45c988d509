"""Tracks a dict with every kind of value, is saved in one run and looks at what came back in the next."""

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import nn

from overnight import trainer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def everything() -> dict:
    generator = torch.Generator().manual_seed(1)
    state: dict = {
        str(dtype): torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        for dtype in DTYPES
    }
    base = torch.randn(4, 6, dtype=torch.complex64, generator=generator)
    large = torch.randn(1_500_000, generator=generator)  # in several segments
    state |= {
        "views": [base, base.t(), base.conj(), base[:1].expand(3, 6), base[::2]],
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), torch.tensor(3.5)],
        "sparse": (torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr()),
        "tied": [large, large, large[:10]],
        ("key", 1): {None: {1, 2}, 2.5: b"\x00\xff", "äö/../λ": frozenset("ab"), "$": "tensor"},
        "numpy": [np.arange(3, dtype=">f8"), np.float32(0.1), np.zeros(2, dtype=[("x", "<i4")])],
        "numbers": [float("nan"), float("inf"), 2**100, -0.0, True, None],
        "names/with\nodd ~2 characters": torch.ones(1),
    }
    return state


def described(value):
    """Equal texts for equal values, bits and ties included."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return str(value.layout), described(value.to_dense())
        bits = value.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bits.numpy().tobytes()
    if isinstance(value, dict):
        return [(repr(key), described(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    return type(value).__name__, repr(value)


with trainer.run(every=None) as run:
    state = everything() if not run.resumed else {}
    net = nn.Linear(3, 3)
    run.track(all=state, net=net)
    Path(f"seen-{run.resumed}-{run.rank}").write_bytes(pickle.dumps((described(state), net.weight.tolist())))
    if run.resumed:
        assert state["tied"][0] is state["tied"][1]
    for _ in run.steps(1):
        pass

"""States that go the way of a checkpoint, without the disk: taken apart, copied, turned into text, put back."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from overnight.trainer.checkpoint.sharding import Chunk
from overnight.trainer.checkpoint.state import decode, encode, needs
from overnight.trainer.checkpoint.tracked import device_for, fit_of, put_back, require_trackable, state_of


class Copy:
    """A copy of the states of objects at one moment."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, obj in objects.items():
            require_trackable(name, obj)
        encoded = encode({name: state_of(obj) for name, obj in objects.items()})
        self.objects: dict[str, Any] = json.loads(json.dumps(encoded.objects))
        self.tensors = {key: copied(leaf.tensor) for key, leaf in encoded.leaves.items()}

    def read(self, key: str, chunk: Chunk | None = None) -> torch.Tensor:
        tensor = self.tensors[key].clone()
        if chunk is None:
            return tensor
        return tensor[tuple(slice(start, start + n) for start, n in zip(chunk.at, chunk.shape, strict=True))].clone()

    def value(self, name: str) -> Any:
        assert {key for key, _ in needs(self.objects[name])} <= set(self.tensors)
        return decode(self.objects[name], self.read)

    def give(self, **objects: Any) -> None:
        for name, obj in objects.items():
            put_back(obj, decode(self.objects[name], self.read, device_for(obj, torch.device("cpu")), fit_of(obj)))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """As staging copies: into contiguous memory of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def round_trip(value: Any) -> Any:
    copy = Copy({"it": {"value": value}})
    return copy.value("it")["value"]

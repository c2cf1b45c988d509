"""Random generators of the user's own as data: torch's, numpy's and python's, each rank's for itself.

A state is one small array, so that whoever stores it can tell by its bytes whether all ranks had the same. At another
number of ranks that decides: generators that were equal everywhere stay so, those that differed cannot be handed to
other ranks (two would draw the same), and are seeded anew.
"""

import json
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from overnight.core.errors import CheckpointError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random

_BLOCK_BYTES = 8192
"""Holds the state of any generator here; the largest is a Mersenne twister of 625 words."""


def is_generator(obj: Any) -> bool:
    """Whether this module knows how to save it."""
    return isinstance(obj, Generator) and not isinstance(obj, random.SystemRandom)


def capture(generator: Generator) -> Any:
    """The state of a generator.

    Returns:
        ``{"kind", "state"}`` with ``state`` a flat uint8 tensor (torch) or array.
    """
    if isinstance(generator, torch.Generator):
        return {"kind": generator.device.type, "state": generator.get_state()}
    if isinstance(generator, random.Random):
        return {"kind": "python", "state": _pack(generator.getstate())}
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = _bits(generator).state
    return {"kind": state["bit_generator"], "state": _pack(state)}


def restore(generator: Generator, saved: dict[str, Any]) -> None:
    """Puts a generator where it was; the other direction of :func:`capture`.

    Raises:
        ValueError: The state is that of another kind of generator.
    """
    kind = capture(generator)["kind"]
    if saved["kind"] != kind:
        raise ValueError(f"it is a {kind} generator, the saved one was {saved['kind']}")
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.as_tensor(saved["state"], dtype=torch.uint8, device="cpu"))
        return
    state = _unpack(saved["state"])
    if isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def reseed(generator: Generator, seed: int) -> None:
    """Starts a generator anew.

    Args:
        generator: Of the user.
        seed: In [0, 2**63).
    """
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        fresh: Any = np.random.MT19937(seed)
        generator.set_state(fresh.state)
    else:
        bits = _bits(generator)
        bits.state = type(bits)(seed).state


def _bits(generator: np.random.Generator | np.random.BitGenerator) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _pack(state: Any) -> NDArray[np.uint8]:
    """JSON padded to a fixed length, so that what is staged keeps its size from save to save."""
    text = json.dumps(state, default=_describe, sort_keys=True).encode()
    padded = text.ljust(-(-len(text) // _BLOCK_BYTES) * _BLOCK_BYTES)
    return np.frombuffer(bytearray(padded), dtype=np.uint8)


def _describe(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, np.integer):
        return int(value)
    raise CheckpointError(
        f"a generator with {type(value).__name__} in its state cannot be saved",
        hint="Use a generator of numpy, such as numpy.random.default_rng(seed).",
    )


def _unpack(data: Any) -> Any:
    def revive(value: dict[str, Any]) -> Any:
        return np.array(value["values"], dtype=value["dtype"]) if value.keys() == {"dtype", "values"} else value

    return json.loads(bytes(np.asarray(data, dtype=np.uint8)), object_hook=revive)

"""Random state as data, because exact resume needs every generator saved, restored, or derived from a counter.

Three needs, three answers:

* Within one world size the process generators (python, numpy, torch CPU, CUDA) are saved and put back bit for bit:
  :func:`capture` and :func:`restore`.
* At another world size there is no state to put back, so a fresh one is derived from ``(seed, step, rank)``:
  :func:`rederive`.
* Work that must not depend on what ran before it (augmentation, samplers) is seeded from a counter inside
  :func:`isolated`, which leaves the process generators as it found them.

A captured state holds only tensors, integers, floats, booleans and strings, so that it can be stored and read without
pickle.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937
from numpy.typing import NDArray

from overnight.core.errors import CheckpointError

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The odd integer closest to 2**64 / phi: the stream increment of splitmix64 (Steele, Lea & Flood 2014)."""

_numpy_random: Any = np.random  # numpy's stubs lack get_bit_generator and set_bit_generator (numpy >= 1.24)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK_32 = 0xFFFFFFFF
_STATE_VERSION = 1
_NUMPY_WORDS = 624
_PYTHON_WORDS = 625


def splitmix64(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The outputs number ``counters`` of the splitmix64 stream with the given key.

    Source: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the finaliser
    constants of Stafford's variant 13.

    Args:
        key: The stream, 0 <= key < 2**64.
        counters: Positions in the stream, any shape.

    Returns:
        64 random bits per counter, same shape. A pure function of its arguments on every machine.
    """
    z = counters * np.uint64(GOLDEN_GAMMA) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def derive(seed: int, *keys: int | str) -> int:
    """An independent seed for each path of keys: ``derive(seed, "sampler", epoch)``.

    BLAKE2b with an 8 byte digest over the decimal or UTF-8 form of every part, each with its type and length in
    front, so that ``("ab", "c")`` and ``("a", "bc")``, or ``1`` and ``"1"``, never meet. The mapping is a promise
    across versions: orders and augmentations depend on it.

    Args:
        seed: Any integer.
        *keys: What the seed is for: names and counters.

    Returns:
        An integer in [0, 2**63), which every generator and every tensor takes.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"overnight-rng")
    for part in (int(seed), *keys):
        text = part if isinstance(part, str) else str(int(part))
        data = text.encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds the default generators of python, numpy, torch CPU and every CUDA device with one integer >= 0."""
    torch.manual_seed(seed)
    seed_cpu(seed)


def seed_cpu(seed: int) -> None:
    """Seeds the default generators of python, numpy and torch CPU: 12 us, for one sample's augmentation.

    ``torch.manual_seed`` takes 15 times as long as the default generator's own method, since it visits every
    accelerator. numpy's legacy generator takes 32 bits in 2 us and more bits in 14 us; 32 are enough here.
    """
    random.seed(seed)
    np.random.seed((seed ^ (seed >> 32)) & _MASK_32)
    torch.default_generator.manual_seed(seed)


def rederive(seed: int, step: int, rank: int) -> None:
    """Seeds all process generators for a resume at another world size, where no rank's saved state fits.

    Args:
        seed: The trial's seed.
        step: The number of updates done.
        rank: Global rank.
    """
    seed_all(derive(seed, "process", step, rank))


@contextmanager
def isolated() -> Iterator[None]:
    """Leaves python's, numpy's and torch's CPU generators as they were on entry, whatever happens inside.

    Costs about 75 us. numpy's bit generator is exchanged instead of saved and put back, which is twice as fast; the
    swap drops a cached Gaussian, so that the full state is put back in the one case where there was one.
    """
    python_state = random.getstate()
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state(legacy=False)
    numpy_generator = _numpy_random.get_bit_generator()
    _numpy_random.set_bit_generator(MT19937(0))
    try:
        yield
    finally:
        _numpy_random.set_bit_generator(numpy_generator)
        if numpy_state.get("has_gauss"):
            np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)


def capture() -> dict[str, Any]:
    """The state of every default generator of this process.

    Returns:
        ``{"version", "python", "numpy", "torch", "cuda"}``: tensors (int64 words, uint8 states), integers, floats,
        booleans and strings only. ``cuda`` is one uint8 tensor per visible device, empty if CUDA was not used.

    Raises:
        CheckpointError: numpy's global generator was replaced by one whose state cannot be stored.
    """
    return {
        "version": _STATE_VERSION,
        "python": _capture_python(),
        "numpy": _capture_numpy(),
        "torch": torch.default_generator.get_state(),
        "cuda": _capture_cuda(),
    }


def restore(state: dict[str, Any]) -> None:
    """Puts back what :func:`capture` returned.

    Every part is checked before the first generator is touched, so that a failure leaves all of them alone.

    Raises:
        CheckpointError: A part is missing or malformed, or was taken with more CUDA devices than are visible now.
    """
    try:
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"version {state['version']}")
        python_state = _python_state(state["python"])
        numpy_state = _numpy_state(state["numpy"])
        torch_state = torch.as_tensor(state["torch"], dtype=torch.uint8, device="cpu")
        cuda_states = [torch.as_tensor(one, dtype=torch.uint8, device="cpu") for one in state["cuda"]]
        torch.Generator().set_state(torch_state)
        random.Random().setstate(python_state)
        np.random.RandomState().set_state(numpy_state)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"the saved random state cannot be restored: {type(error).__name__}: {error}",
            hint="The checkpoint was written by another version or was altered. Resume from an older one.",
        ) from error
    _require_cuda(len(cuda_states))
    torch.default_generator.set_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    for device, cuda_state in enumerate(cuda_states):
        torch.cuda.set_rng_state(cuda_state, device)


def _require_cuda(num_states: int) -> None:
    num_devices = torch.cuda.device_count() if num_states else 0
    if num_states > num_devices:
        raise CheckpointError(
            f"the random state was saved with {num_states} CUDA device(s), this process sees {num_devices}",
            hint="Resume with as many devices per process, or derive a new state: rng.rederive(seed, step, rank).",
        )


def _capture_cuda() -> list[torch.Tensor]:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(torch.cuda.get_rng_state_all()) if initialized else []


def _capture_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "version": int(version),
        "words": torch.from_numpy(np.array(words, dtype=np.int64)),  # by way of numpy in a quarter of the time
        "has_gauss": gauss is not None,
        "gauss": float(gauss or 0.0),
    }


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    words = [int(word) for word in saved["words"]]
    if len(words) != _PYTHON_WORDS:
        raise ValueError(f"python's generator has {_PYTHON_WORDS} words, not {len(words)}")
    gauss = float(saved["gauss"])
    return int(saved["version"]), tuple(words), gauss if saved["has_gauss"] else None


def _capture_numpy() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    kind = state["bit_generator"]
    if kind != "MT19937":
        raise CheckpointError(
            f"numpy's global generator was replaced by {kind}, whose state cannot be saved",
            hint="Keep a numpy.random.Generator of your own and track its state, and leave the global one alone.",
        )
    return {
        "kind": kind,
        "words": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": bool(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _numpy_state(saved: dict[str, Any]) -> tuple[str, NDArray[np.uint32], int, int, float]:
    words = np.asarray(saved["words"], dtype=np.int64)
    if words.shape != (_NUMPY_WORDS,):
        raise ValueError(f"numpy's generator has {_NUMPY_WORDS} words, not shape {words.shape}")
    key = words.astype(np.uint32)
    if not np.array_equal(key, words):
        raise ValueError("numpy's generator has words of 32 bits")
    return str(saved["kind"]), key, int(saved["position"]), int(saved["has_gauss"]), float(saved["gauss"])

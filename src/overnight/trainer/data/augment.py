"""Reads samples with their own random numbers, so that an augmentation is the same wherever and whenever it runs.

Around ``dataset[i]`` the default generators of python, numpy and torch are seeded from (seed, epoch, global position
in the epoch's order): the same sample is augmented the same way at any number of ranks or workers, and after any
resume. Collating is seeded from the position of the batch's first sample. In the training process itself the
generators are put back afterwards; in a worker process nobody else uses them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from overnight.trainer.data.fingerprint import content_hash
from overnight.trainer.rng import isolated, seed_cpu, splitmix64

_COLLATE_OFFSET = np.uint64(1 << 63)


class Task(NamedTuple):
    """What one worker does for one micro-batch.

    Attributes:
        key: Stream of sample seeds: derived from (seed, epoch).
        first: Global position of the first sample.
        indices: Data set indices, int64.
        probe: Whether to hash the content of the data set on the way.
    """

    key: int
    first: int
    indices: NDArray[np.int64]
    probe: bool = False


class Fetched(NamedTuple):
    """The answer to a task that probed: the batch, and the data set's content hash."""

    data: Any
    content: str


class SampleReader:
    """Turns a task into a collated batch. Picklable, as far as the data set and the collate function are.

    Args:
        dataset: The user's map-style data set.
        collate: Makes a batch of a list of samples.
        seeded: Seed around each sample and around collating.
        isolate: Put the process's generators back afterwards.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], *, seeded: bool, isolate: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed_samples = seeded and not draws_nothing(dataset)
        self._seed_collate = seeded and (self._seed_samples or collate is not torch.utils.data.default_collate)
        self._isolate = isolate and (self._seed_samples or self._seed_collate)

    def __getitem__(self, task: Task) -> Any:
        if not self._isolate:
            return self._read(task)
        with isolated():
            return self._read(task)

    def _read(self, task: Task) -> Any:
        content = content_hash(self.dataset) if task.probe else ""
        data = self._batch(task)
        return Fetched(data, content) if task.probe else data

    def _batch(self, task: Task) -> Any:
        samples = self._seeded_samples(task) if self._seed_samples else self._plain_samples(task.indices.tolist())
        if self._seed_collate:
            counter = np.array([task.first], dtype=np.uint64) + _COLLATE_OFFSET
            seed_cpu(int(splitmix64(task.key, counter)[0] >> np.uint64(1)))
        return self._collate(samples)

    def _seeded_samples(self, task: Task) -> list[Any]:
        counters = np.arange(task.first, task.first + len(task.indices), dtype=np.uint64)
        seeds = (splitmix64(task.key, counters) >> np.uint64(1)).tolist()
        samples = []
        for index, seed in zip(task.indices.tolist(), seeds, strict=True):
            seed_cpu(seed)
            samples.append(self._sample(index))
        return samples

    def _plain_samples(self, indices: list[int]) -> list[Any]:
        if callable(read_many := getattr(self.dataset, "__getitems__", None)):
            return list(read_many(indices))
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


def draws_nothing(dataset: Any) -> bool:
    """Whether reading a sample certainly draws no random number: tensors, arrays, lists and parts of them."""
    kind = type(dataset)
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return kind in (TensorDataset, list, tuple, range, np.ndarray, torch.Tensor)

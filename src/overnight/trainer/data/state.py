"""A loader's place as it is stored in a checkpoint: plain values, checked when they come back."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from overnight.core.errors import DataError, DatasetChangedError

STATE_VERSION = 1


@dataclass(frozen=True)
class LoaderState:
    """Where a loader was, and what must still hold for that place to mean the same samples.

    Attributes:
        name: The loader's name.
        epoch: From 0.
        position: Samples of the epoch that all ranks together had consumed.
        dataset_length: Number of samples in the data set.
        fingerprint: Identity of its content; None if it was not known yet.
        global_batch: Samples per update.
        world_size: Number of ranks that read different samples.
        seed: Of order and augmentation.
        sampler: Kind of order.
        order: What else the order depends on (hash of weights, or of a sampler's epoch), may be empty.
    """

    name: str
    epoch: int
    position: int
    dataset_length: int
    fingerprint: str | None
    global_batch: int
    world_size: int
    seed: int
    sampler: str
    order: str

    def to_dict(self) -> dict[str, Any]:
        """Integers, strings and None only."""
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "LoaderState":
        """Reads :meth:`to_dict`; unknown keys of a later version's additions are ignored.

        Raises:
            DataError: A key is missing or of another type, or the version is not known.
        """
        version = state.get("version")
        if version != STATE_VERSION:
            raise DataError(
                f"a loader state of version {version!r} cannot be read, this is version {STATE_VERSION}",
                hint="Resume with the version of overnight that wrote the checkpoint.",
            )
        values = {field.name: state.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            if not _is_valid(field.name, field.type, values[field.name]):
                raise DataError(
                    f"the loader state has {field.name}={values[field.name]!r:.60}",
                    hint="The checkpoint was altered, or the state is not that of a DataLoader.",
                )
        return cls(**values)  # type: ignore[arg-type]

    def require_same(self, what: str, saved: Any, now: Any) -> None:
        """Raises :class:`DatasetChangedError` unless two values are equal."""
        if saved != now:
            raise DatasetChangedError(
                f"loader {self.name!r} was saved with {what} {saved}, now it is {now}",
                hint="Restore what it was, start afresh, or pass allow_changed=True to continue at the same position.",
                saved=saved,
                now=now,
            )


def _is_valid(name: str, kind: Any, value: Any) -> bool:
    if name == "fingerprint" and value is None:
        return True
    if kind is int:
        return isinstance(value, int) and (name == "seed" or value >= 0)
    return isinstance(value, str)

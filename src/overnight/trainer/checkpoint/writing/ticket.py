"""What has become of an order, as the trainer knows it."""

from dataclasses import dataclass, field
from typing import Protocol

from overnight.core.errors import OvernightError
from overnight.trainer.checkpoint.place import CheckpointName


class Arena(Protocol):
    """The staging memory, as the writer sees it."""

    @property
    def number(self) -> int:
        """Another number means another memory: its descriptor is handed over again."""

    @property
    def size(self) -> int:
        """Bytes."""

    def fileno(self) -> int:
        """Descriptor of the memory."""


@dataclass
class Ticket:
    """The fate of one order; the client updates it, see ``WriterClient.poll``.

    Attributes:
        number: Of the order.
        name: Of the checkpoint.
        submitted_at: ``time.monotonic()`` at submission.
        stage: What the process does with it: ``queued hashing writing uploading waiting publishing done``.
        released: The arena is not read any more, whatever happens; it may be overwritten.
        committed: Published, hence durable; on every rank.
        error: Why it was not. Nothing was published.
        published: On rank 0, once committed: the checkpoint that holds the state; an earlier one if nothing has
            changed since.
        published_bytes: Bytes of that checkpoint.
        num_bytes: What this rank wrote, once released.
        num_tries: Processes that worked on it; more than 1 after a death.
        seconds: Time by stage, and ``total`` from submission to the end.
    """

    number: int
    name: CheckpointName
    submitted_at: float
    stage: str = "queued"
    released: bool = False
    committed: bool = False
    error: OvernightError | None = None
    published: CheckpointName | None = None
    published_bytes: int = 0
    num_bytes: int = 0
    num_tries: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Committed or failed."""
        return self.committed or self.error is not None

"""The trainer's side of the writer process: spawn it, hand it orders, notice when it dies, redo what it left."""

from typing import Protocol

from overnight.trainer.checkpoint.writing.order import SaveOrder
from overnight.trainer.checkpoint.writing.ticket import Arena, Ticket

__all__ = ["Arena", "Ticket", "Writes"]


class Writes(Protocol):
    """What :class:`WriterClient` (built as ``WriterClient(place_url, author, retention, staging_dir)``) offers.

    All calls come from one thread. None but :meth:`wait` and :meth:`close` waits for the process.
    """

    @property
    def busy(self) -> bool:
        """Whether some order still reads the arena: do not overwrite it."""

    def start(self) -> None:
        """Spawns the process and returns at once."""

    def submit(self, order: SaveOrder, arena: Arena) -> Ticket:
        """Hands an order over; the arena stays untouched until ``ticket.released``.

        Never raises for what goes wrong with the save itself: that is ``ticket.error``.
        """

    def poll(self) -> list[Ticket]:
        """Takes in what the process says, respawns it if it died, and updates tickets.

        Returns:
            Tickets that were done since the last call.
        """

    def wait(self, ticket: Ticket, seconds: float | None = None) -> bool:
        """Waits until a ticket is done.

        Returns:
            False if it is not after that many seconds.
        """

    def close(self, seconds: float = 5.0) -> None:
        """Ends the process: orderly if it is idle, else by SIGKILL; leaves no zombie. May be called twice."""

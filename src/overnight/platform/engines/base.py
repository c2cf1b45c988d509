"""What an engine is: the way from committed attempts to processes on nodes, and nothing more.

The store says what should run; an engine says it to the nodes. It never decides, and holds no truth: kill the
server, start it again, and the same store gives the same work.
"""

from typing import TYPE_CHECKING, Protocol

from overnight.core.models.node import Work

if TYPE_CHECKING:
    from overnight.store.engine import Connection


class Engine(Protocol):
    """Starts and ends processes on nodes.

    Every implementation guarantees:

    - *Level-triggered*: :meth:`work` is a function of the store. Asked twice it answers the same, and a node that
      missed any number of answers is put right by the next one.
    - *Idempotent*: an attempt in ``launches`` is started at most once, however often it is named, by whichever daemons.
    - *Confirmed*: an attempt stays in ``launches`` until its supervisor has said that it started, and its lease
      stays until the node has said that no process is left.
    """

    def work(self, conn: "Connection", node_id: str) -> Work:
        """What should be on a node now.

        Args:
            conn: A snapshot of the store.
            node_id: The node.

        Returns:
            The work; its ``version`` differs whenever its content does.
        """
        ...

    def news(self, conn: "Connection", node_id: str, known: int | None) -> Work | None:
        """:meth:`work`, or None while its version is the one that the node knows."""
        ...

    def poke(self) -> None:
        """Tells the nodes that a server is there, so that they need not find out by trying. Never fails."""
        ...

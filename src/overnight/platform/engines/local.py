"""The engine of one machine: the node daemon of the same home asks, this computes the answer from the store."""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overnight.core.enums import LeaseState
from overnight.core.models.api import Trial
from overnight.core.models.node import Order, OrderDevice, Work
from overnight.core.settings import Settings
from overnight.platform.engines.orders import Surroundings, make_order
from overnight.store import attempts, devices, trials

if TYPE_CHECKING:
    from overnight.store.engine import Connection

POKE_SECONDS = 0.2


@dataclass(frozen=True)
class _Wishes:
    """What should be on a node, by attempts."""

    launches: tuple[attempts.LiveAttempt, ...]
    keep: tuple[str, ...]
    kill: tuple[str, ...]

    @property
    def version(self) -> int:
        """A hash of the rest, so that it needs no memory."""
        content = [[one.id for one in self.launches], sorted(self.keep), sorted(self.kill)]
        return int.from_bytes(hashlib.sha256(json.dumps(content).encode()).digest()[:7], "big")


class LocalEngine:
    """An :class:`~overnight.platform.engines.base.Engine` for nodes that share the server's file system.

    Args:
        settings: Home and grace.
        kills: For a node id, ids of attempts that must be killed now, without grace (the scheduler's).
        num_cores: Processor cores of the node; this machine's by default.
        mtbf_seconds: For ids of devices, the mean time between failures of one of them.
    """

    def __init__(
        self,
        settings: Settings,
        kills: Callable[[str], Sequence[str]] = lambda node_id: (),
        num_cores: int | None = None,
        mtbf_seconds: Callable[[Sequence[str]], float | None] = lambda device_ids: None,
    ) -> None:
        self._settings = settings
        self._kills = kills
        self._mtbf_seconds = mtbf_seconds
        self._num_cores = num_cores or len(os.sched_getaffinity(0))

    def work(self, conn: "Connection", node_id: str) -> Work:
        """What should be on the node now."""
        return self._work(conn, node_id, self._wishes(conn, node_id))

    def news(self, conn: "Connection", node_id: str, known: int | None) -> Work | None:
        """:meth:`work`, or None while its version is the one that the node knows."""
        wishes = self._wishes(conn, node_id)
        return None if wishes.version == known else self._work(conn, node_id, wishes)

    def poke(self) -> None:
        """Wakes the daemon, if there is one."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(POKE_SECONDS)
            channel.connect(str(self._settings.paths.node_socket))
            channel.sendall(b'{"op": "poke"}\n')

    def _work(self, conn: "Connection", node_id: str, wishes: _Wishes) -> Work:
        launches = self._orders(conn, node_id, wishes.launches) if wishes.launches else ()
        return Work(version=wishes.version, launches=launches, keep=wishes.keep, kill=wishes.kill)

    def _wishes(self, conn: "Connection", node_id: str) -> _Wishes:
        live = attempts.live(conn, node_id)
        running = [one for one in live if one.ended_at is None and one.lease_state is LeaseState.ACTIVE]
        # Ended here but not clean: whatever the node still has goes; if it has nothing, it says so.
        over = (one.id for one in live if one.ended_at is not None)
        return _Wishes(
            launches=tuple(one for one in running if one.started_at is None),
            keep=tuple(one.id for one in live if one.ended_at is None),
            kill=tuple(dict.fromkeys([*self._kills(node_id), *over])),
        )

    def _orders(self, conn: "Connection", node_id: str, launches: Sequence[attempts.LiveAttempt]) -> tuple[Order, ...]:
        on_node = devices.for_orders(conn, node_id)
        asked = trials.bare(conn, {one.trial_id for one in launches})
        return tuple(self._order(one, asked[one.trial_id], on_node) for one in launches)

    def _order(self, attempt: attempts.LiveAttempt, trial: Trial, on_node: Sequence[OrderDevice]) -> Order:
        around = Surroundings(
            home=self._settings.paths,
            grace_seconds=self._settings.grace_seconds,
            num_cores=self._num_cores,
            num_devices=len(on_node),
            mtbf_seconds=self._mtbf_seconds(attempt.device_ids),
        )
        leased = set(attempt.device_ids)
        return make_order(
            trial,
            attempt_id=attempt.id,
            number=attempt.number,
            generation=attempt.generation,
            node_id=attempt.node_id,
            devices=[device for device in on_node if device.id in leased],
            objective=trial.config.objective,
            around=around,
        )

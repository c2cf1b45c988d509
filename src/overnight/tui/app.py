"""The dashboard: one Textual app that feeds snapshots to its screen."""

from collections.abc import Callable

from textual.app import App

from overnight.agents.client import AsyncClient
from overnight.core.settings import Settings
from overnight.tui.screens.queue import QueueScreen
from overnight.tui.snapshot import ServerSource, Snapshot, Source


class OvernightApp(App[None]):
    """Read-only, live view of a server.

    Args:
        source: Makes the snapshots.
        screen: The screen to show; the queue if None.
    """

    TITLE = "overnight"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source, screen: Callable[[], QueueScreen] = QueueScreen) -> None:
        super().__init__()
        self.source = source
        self._first_screen = screen
        self.last: Snapshot | None = None

    def on_mount(self) -> None:
        """Shows the screen and starts to follow the source."""
        self.push_screen(self._first_screen())
        self.run_worker(self._follow(), group="snapshots", exclusive=True)

    async def _follow(self) -> None:
        async for snapshot in self.source.snapshots():
            self.last = snapshot
            screen = self.screen
            if isinstance(screen, QueueScreen):
                screen.draw(snapshot)


def run_tui(settings: Settings) -> None:
    """Runs the dashboard until the user quits.

    Raises:
        ServerAwayError: There is no server and never was one in this home.
    """
    client = AsyncClient(settings)
    OvernightApp(ServerSource(client)).run()

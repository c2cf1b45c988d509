"""Takes the screenshots of the README: plays the real demo without a terminal and keeps its most telling moment.

    python docs/shots.py [FOLDER]
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from overnight.agents.client import AsyncClient
from overnight.cli.demo.command import find_example, running_up
from overnight.cli.demo.scenario import Scenario, demo_config
from overnight.cli.demo.story import Beat, BeatState, Story
from overnight.cli.demo.view import DemoApp
from overnight.core.settings import Settings

SIZE = (124, 38)


async def shoot(settings: Settings, folder: Path) -> None:
    """Saves ``demo.svg`` when the urgent trial runs and, at the end, ``queue.svg``."""
    story = Story()
    client = AsyncClient(settings)
    app = DemoApp(Scenario(client, settings.paths, story, demo_config(find_example("digits.py"), sys.executable)))
    moments: asyncio.Queue[str] = asyncio.Queue()

    def listener(beat: Beat) -> None:
        if beat.key == "urgent" and beat.state is BeatState.DONE:
            moments.put_nowait("demo.svg")
        if beat.key == "finish" and beat.state is BeatState.DONE:
            moments.put_nowait("queue.svg")

    story.listeners.append(listener)
    async with app.run_test(size=SIZE) as pilot:
        for _ in range(2):
            name = await asyncio.wait_for(moments.get(), 180)
            await pilot.pause(1.0)
            app.save_screenshot(name, str(folder))
            print(folder / name)


def main() -> None:
    """Plays and saves."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="overnight-shots-") as home:
        settings = Settings(home=Path(home), pool="fake:4", probe_seconds=0.5, heartbeat_seconds=1.0)
        with running_up(settings):
            asyncio.run(shoot(settings, folder))


if __name__ == "__main__":
    main()

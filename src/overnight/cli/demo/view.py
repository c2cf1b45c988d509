"""How the demo looks: a live screen in a terminal, calm lines elsewhere, and a page at the end."""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from overnight.cli import render
from overnight.cli.demo.facts import Facts
from overnight.cli.demo.scenario import Scenario
from overnight.cli.demo.story import Beat, BeatState, Story
from overnight.core.models.api import Leaderboard
from overnight.core.settings import Settings
from overnight.tui import format as look
from overnight.tui.app import OvernightApp
from overnight.tui.screens.queue import QueueScreen
from overnight.tui.snapshot import ServerSource

SHOWN_ROWS = 10

SIGNS = {
    BeatState.WAITING: ("·", "bright_black"),
    BeatState.HAPPENING: ("▶", "bold cyan"),
    BeatState.DONE: ("✓", "green"),
}


def beat_lines(beat: Beat) -> Text:
    """A beat as one line, or as two while it happens: then its meaning is said too."""
    sign, style = SIGNS[beat.state]
    text = Text(f" {sign} ", style=style, no_wrap=True, overflow="ellipsis")
    text.append(beat.title, style="bold" if beat.state is BeatState.HAPPENING else style if sign == "·" else "")
    if beat.detail:
        detail = look.plain(beat.detail, 160)
        detail.stylize("cyan" if beat.state is BeatState.HAPPENING else "dim")
        text.append("  ").append(detail)
    if beat.state is BeatState.HAPPENING:
        text.append(f"\n   {beat.why}", style="italic bright_black")
    return text


def story_text(story: Story) -> Text:
    """All beats."""
    return Text("\n").join([beat_lines(beat) for beat in story.beats])


class DemoScreen(QueueScreen):
    """The queue screen with the story on top."""

    CSS = (
        QueueScreen.CSS
        + """
    #story { height: auto; border: round $primary; border-title-color: $primary; padding: 0 1; }
    """
    )

    def __init__(self, story: Story) -> None:
        super().__init__()
        self.story = story

    def compose(self) -> ComposeResult:
        """The story, then the queue."""
        panel = Static(story_text(self.story), id="story", markup=False)
        panel.border_title = "What is happening, and why it matters"
        yield panel
        yield from super().compose()

    def on_mount(self) -> None:
        """Follows the story."""
        self.story.listeners.append(lambda _: self._tell())

    def _tell(self) -> None:
        if self.is_attached:
            self.query_one("#story", Static).update(story_text(self.story))


class DemoApp(OvernightApp):
    """Plays the scenario and leaves when it is over; ``outcome`` is then the facts or the error."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(ServerSource(scenario.client), lambda: DemoScreen(scenario.story))
        self.scenario = scenario
        self.outcome: Facts | BaseException | None = None

    def on_mount(self) -> None:
        """Starts the play."""
        self.run_worker(self._play(), group="scenario")

    async def _play(self) -> None:
        try:
            self.outcome = await self.scenario.play()
        except Exception as error:  # shown by the caller once the terminal is back
            self.outcome = error
        self.exit()


async def play_live(scenario: Scenario) -> Facts:
    """Plays on a full screen.

    Raises:
        KeyboardInterrupt: The user left before the end.
    """
    app = DemoApp(scenario)
    await app.run_async()
    if isinstance(app.outcome, BaseException):
        raise app.outcome
    if app.outcome is None:
        raise KeyboardInterrupt
    return app.outcome


async def play_plain(scenario: Scenario, say: Callable[[str], None]) -> Facts:
    """Plays with one line per news, for pipes, logs and dumb terminals."""
    began = time.monotonic()
    told: set[tuple[str, BeatState]] = set()

    def listener(beat: Beat) -> None:
        first = (beat.key, beat.state) not in told
        told.add((beat.key, beat.state))
        if first:
            sign, _ = SIGNS[beat.state]
            words = [beat.detail] if beat.detail else []
            words += [beat.why] if beat.state is BeatState.HAPPENING else []
            say(f"{time.monotonic() - began:6.1f} s  {sign} {beat.title}. {' - '.join(words)}")

    scenario.story.listeners.append(listener)
    return await scenario.play()


def final_page(facts: Facts, board: Leaderboard, settings: Settings) -> Group:
    """What was reached, and where to look further."""
    good, bad = Text("✓ ", style="green"), Text("✗ ", style="bold red")

    def line(ok: bool, text: str) -> Text:
        return (good if ok else bad).copy().append(text, style="" if ok else "bold red")

    whole = (
        facts.samples_recorded == facts.samples_expected and not facts.samples_repeated and not facts.samples_skipped
    )
    lines = [
        line(not facts.trials_failed, f"{facts.trials_completed} trials completed, {facts.trials_failed} failed"),
        line(facts.device_faults > 0, f"{facts.device_faults} device broke; its trial went on elsewhere"),
        line(facts.preemptions > 0, f"{facts.preemptions} pre-emption for an urgent trial"),
        line(facts.server_restarts > 0, f"{facts.server_restarts} SIGKILL and restart of the server"),
        line(
            whole,
            f"{facts.samples_recorded:,} of {facts.samples_expected:,} samples trained on, "
            f"{facts.samples_repeated} repeated, {facts.samples_skipped} skipped",
        ),
        line(
            facts.undisturbed_match,
            "an interrupted trial and its undisturbed rerun have equal weights, bit for bit",
        ),
        Text(f"  devices busy {facts.utilization:.0%} of the time; {facts.seconds:.0f} s in all", style="dim"),
    ]
    rows = render.leaderboard(board.rows[:SHOWN_ROWS], board.metric)
    home = settings.home
    pointers = Table.grid(padding=(0, 2))
    pointers.add_row(Text("MLflow", style="bold"), f"mlflow ui --backend-store-uri {settings.effective_mlflow_uri}")
    pointers.add_row(Text("Output", style="bold"), f"{home / 'trials'}/<trial>/attempts/<n>/out.log")
    pointers.add_row(Text("Server", style="bold"), f"{home / 'logs'}")
    pointers.add_row(Text("Next", style="bold"), "overnight up, then: overnight submit train.py --lr 0.001")
    return Group(
        Text(),
        Panel(
            rows,
            title="Leaderboard",
            title_align="left",
            border_style="bright_black",
        ),
        Text(),
        *lines,
        Text(),
        pointers,
    )


def show_final(console: Console, facts: Facts, board: Leaderboard, settings: Settings) -> None:
    """Prints the last page."""
    console.print(final_page(facts, board, settings), soft_wrap=False)


def run_scenario(scenario: Scenario, *, live: bool, say: Callable[[str], None]) -> Facts:
    """Plays to the end, live or plain."""
    return asyncio.run(play_live(scenario) if live else play_plain(scenario, say))

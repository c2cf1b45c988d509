"""Fixtures for pytest. Loaded in every run of every user, so it imports nothing until a fixture is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from overnight.core.paths import Home
    from overnight.testing.clock import FakeClock
    from overnight.testing.faults import FaultScript


@pytest.fixture
def overnight_clock() -> FakeClock:
    """A clock that moves when it is told to."""
    from overnight.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def overnight_home(tmp_path: Path) -> Home:
    """An empty home of its own, folder made."""
    from overnight.core.paths import Home

    root = tmp_path / "home"
    root.mkdir()
    return Home(root)


@pytest.fixture
def overnight_faults(overnight_home: Home, overnight_clock: FakeClock) -> FaultScript:
    """Faults for the fake pool of ``overnight_home``, on ``overnight_clock``."""
    from overnight.testing.faults import FaultScript

    return FaultScript(overnight_home, overnight_clock)

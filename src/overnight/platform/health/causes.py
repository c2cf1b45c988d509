"""The table of causes: what a signal means is data with a version, as vendors revise it more often than we release."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from overnight.core.errors import InvalidSpecError


class CauseAction(StrEnum):
    """What is done about a cause, from worst to nothing."""

    QUARANTINE_NODE = "quarantine_node"
    QUARANTINE = "quarantine"
    SUSPECT = "suspect"
    APPLICATION = "application"
    RECORD = "record"


FATAL_ACTIONS = frozenset({CauseAction.QUARANTINE_NODE, CauseAction.QUARANTINE})
SOFT_ACTIONS = frozenset({CauseAction.SUSPECT, CauseAction.APPLICATION})


@dataclass(frozen=True, slots=True)
class Cause:
    """One signal.

    Attributes:
        name: Such as ``xid_79`` or ``row_remap_failed``.
        weight: Suspicion that one occurrence adds; 0 for causes that are not soft.
        meaning: For people, a clause without a full stop.
    """

    name: str
    action: CauseAction
    weight: float
    meaning: str

    @property
    def is_fatal(self) -> bool:
        """Whether it quarantines at once."""
        return self.action in FATAL_ACTIONS

    @property
    def condemns_node(self) -> bool:
        """Whether nothing new may start on the other devices of its node either."""
        return self.action is CauseAction.QUARANTINE_NODE

    @property
    def is_soft(self) -> bool:
        """Whether it adds suspicion."""
        return self.action in SOFT_ACTIONS


@dataclass(frozen=True)
class CauseTable:
    """All causes and the thresholds that go with them.

    Attributes:
        half_life_hours: After this long a suspicion weighs half.
        quarantine_hours: How long a first quarantine lasts.
        suspect_at: Suspicion from which a device is ``suspect``: leased last.
        quarantine_at: Suspicion from which it is quarantined.
    """

    version: str
    half_life_hours: float
    quarantine_hours: float
    suspect_at: float
    quarantine_at: float
    causes: Mapping[str, Cause]

    def get(self, name: str) -> Cause:
        """The cause of that name. An unknown one is suspicious: a signal nobody knows must not pass as health."""
        return self.causes.get(name) or Cause(name, CauseAction.SUSPECT, 1.0, "a signal that is not in the table")

    def split(self, names: Iterable[str]) -> tuple[str | None, str | None]:
        """The first fatal and the first soft of ``names``, as a device report carries them."""
        found = [self.get(name) for name in names]
        fatal = next((c.name for c in found if c.is_fatal), None)
        return fatal, next((c.name for c in found if c.is_soft), None)


def parse_causes(text: str, base: CauseTable | None = None) -> CauseTable:
    """A table from TOML. With ``base`` it overrides: what the text does not name stays as it is there.

    Raises:
        InvalidSpecError: Not TOML, an unknown action, a key that is missing, or a negative number.
    """
    try:
        data = tomllib.loads(text)
        causes = {} if base is None else dict(base.causes)
        for entry in data.pop("cause", []):
            causes.update(_entry(entry))
        defaults: dict[str, Any] = {} if base is None else {k: v for k, v in vars(base).items() if k != "causes"}
        numbers = {k: str(v) if k == "version" else _positive(k, v) for k, v in (defaults | data).items()}
        return CauseTable(**numbers, causes=causes)  # type: ignore[arg-type]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise InvalidSpecError(
            f"the table of health causes is not valid: {error}",
            hint="Write [[cause]] entries with names, action and meaning; see overnight/platform/health/causes.toml.",
        ) from None


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def _entry(entry: dict[str, Any]) -> dict[str, Cause]:
    action = CauseAction(entry["action"])
    weight = _positive("weight", entry["weight"]) if action in SOFT_ACTIONS else 0.0
    return {str(name): Cause(str(name), action, weight, str(entry["meaning"])) for name in entry["names"]}


@cache
def shipped_causes() -> CauseTable:
    """The table that comes with overnight."""
    return parse_causes((resources.files("overnight.platform.health") / "causes.toml").read_text("utf-8"))

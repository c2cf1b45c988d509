"""What tidying needs to know of a checkpoint, read leniently.

Deleting must err on the side of keeping: a manifest of a later version, or a damaged one, still says which shared
folders it needs. So nothing is verified here and no format is asked for; who restores uses the manifest itself.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from overnight.trainer.checkpoint.manifest import MANIFEST, hash_of_body
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token

_BASE = re.compile(rb"base-[0-9a-f]{32}")
_known: WeakKeyDictionary[Place, dict[CheckpointName, "Summary"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Summary:
    """A checkpoint in a few words.

    Attributes:
        name: Its name.
        readable: Whether its manifest is there and is JSON.
        bases: Names of shared folders that it mentions.
        metrics: What the script had reported by then.
        num_bytes: Of the files in its own folder, as listed.
        created_at: ISO 8601, empty if unknown; for people and for "oldest first", never for safety.
        kind: Why it was saved.
        world_size: Ranks that wrote it, 0 if unknown.
        retention: The rules of the run that wrote it, as JSON; empty if unknown.
        place: Identity of the place in which it was made; empty if unknown.
        written_as: The name for which its manifest was written; None if unknown.
    """

    name: CheckpointName
    readable: bool = False
    bases: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    created_at: str = ""
    kind: str = ""
    world_size: int = 0
    retention: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    written_as: CheckpointName | None = None

    @property
    def is_renamed(self) -> bool:
        """Whether it lies under another name than its manifest was written for; nobody goes on from such a folder."""
        return self.written_as not in (None, self.name)


def summarize(place: Place, name: CheckpointName) -> Summary:
    """The summary of a published checkpoint, whatever its condition. Read once: manifests never change."""
    known = _known.setdefault(place, {})
    if name not in known:
        try:
            known[name] = _read(place, name)
        except OSError:
            return Summary(name)
    return known[name]


def forget(place: Place, name: CheckpointName) -> None:
    """Gives back what is known of a checkpoint that has been deleted."""
    _known.get(place, {}).pop(name, None)


def _read(place: Place, name: CheckpointName) -> Summary:
    data = place.read(f"{name}/{MANIFEST}")
    bases = frozenset(found.decode() for found in _BASE.findall(data))
    body: Any = None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        outer = json.loads(data)
        if outer["xxh3_128"] == hash_of_body(outer["body"]):
            body = outer["body"]
    if not isinstance(body, dict):
        return Summary(name, bases=bases)
    world_size, retention = body.get("world_size"), body.get("retention")
    return Summary(
        name,
        readable=True,
        bases=bases,
        metrics=_numbers(body.get("metrics")),
        num_bytes=_own_bytes(body.get("files")),
        created_at=str(body.get("created_at", "")),
        kind=str(body.get("kind", "")),
        world_size=world_size if isinstance(world_size, int) else 0,
        retention=retention if isinstance(retention, dict) else {},
        place=str(body.get("place", "")),
        written_as=_written_as(body),
    )


def _written_as(body: Mapping[str, Any]) -> CheckpointName | None:
    parts = [body.get("step"), body.get("attempt"), body.get("generation"), body.get("save", 1)]
    if not all(isinstance(part, int) for part in parts):
        return None
    step, attempt, generation, save = map(int, parts)
    return CheckpointName(step, Token(attempt, generation), save)


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items() if isinstance(value, int | float)}


def _own_bytes(files: Any) -> int:
    if not isinstance(files, dict):
        return 0
    sizes = [
        entry.get("size") for path, entry in files.items() if isinstance(entry, dict) and not path.startswith("../")
    ]
    return sum(size for size in sizes if isinstance(size, int))

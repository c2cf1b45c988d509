"""What an attempt is told to do: the newest word counts, and its version says that it is new."""

from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DirectiveAction
from overnight.core.errors import NotFoundError
from overnight.core.models.node import Directive
from overnight.store import models
from overnight.store.models import storable
from overnight.store.writer import touch

_TABLE = models.attempts
INITIAL = Directive().model_dump(mode="json")
_DIRECTIVE = sa.select(_TABLE.c.directive).where(_TABLE.c.id == sa.bindparam("which"))
_LOCKED_DIRECTIVE = _DIRECTIVE.with_for_update()


def set_directive(
    conn: sa.Connection, *, attempt_id: str, action: DirectiveAction, reason: str, grace_seconds: float = 30.0
) -> Directive:
    """Tells the attempt something else; the version rises. The same words again change nothing.

    Touches ``directives`` and ``attempt:ID``.

    Raises:
        NotFoundError: No such attempt.
    """
    before = _read(conn, _LOCKED_DIRECTIVE, attempt_id)
    after = Directive(version=before.version + 1, action=action, grace_seconds=grace_seconds, reason=reason)
    if after.model_copy(update={"version": before.version}) == before:
        return before
    values = {"directive": after.model_dump(mode="json")}
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == attempt_id).values(values))
    touch(conn, "attempts", "directives", f"attempt:{attempt_id}")
    return after


def directive(conn: sa.Connection, attempt_id: str) -> Directive:
    """What the attempt is told now.

    Raises:
        NotFoundError: No such attempt.
    """
    return _read(conn, _DIRECTIVE, attempt_id)


def _read(conn: sa.Connection, query: sa.Select[Any], attempt_id: str) -> Directive:
    value: Any = conn.scalar(query, {"which": storable(attempt_id)})
    if value is None:
        raise no_attempt(attempt_id)
    return Directive.model_validate(value)


def no_attempt(attempt_id: str) -> NotFoundError:
    """What whoever asks for an attempt that does not exist is told."""
    return NotFoundError(f"there is no attempt {attempt_id[:200]!r}", hint="`overnight show TRIAL` lists a trial's.")


def current_attempt(conn: sa.Connection, trial_id: str, number: int) -> str:
    """Id of a trial's attempt.

    Raises:
        NotFoundError: No such attempt.
    """
    where = (_TABLE.c.trial_id == trial_id) & (_TABLE.c.number == number)
    found: str | None = conn.scalar(sa.select(_TABLE.c.id).where(where))
    if found is None:
        raise NotFoundError(f"trial {trial_id} has no attempt {number}")
    return found

"""One error root, so that a caller can tell what happened, whether to retry, and what to do next.

Every class has a stable ``code`` (what programs compare) and ``retryable``; every instance has a message that says
what happened and a ``hint`` that says what to do next::

    OvernightError
    ├── BadInputError            the caller can fix it
    │   ├── InvalidSpecError         a spec file or wire model that does not validate
    │   ├── InvalidParamsError       params without a canonical form (NaN, huge int, duplicate key …)
    │   ├── NotFoundError            no such experiment, trial, device …
    │   ├── UnsatisfiableError       no node could ever give what the trial asks for
    │   ├── ScriptError              the script is missing or does not parse
    │   ├── RanksDisagreeError       the ranks of a gang did not do the same
    │   ├── BodyTooLargeError        more bytes in one call than the server takes
    │   └── RefusedError             a rule of the house says no (budget, policy)
    ├── ConflictError            the world moved on
    │   ├── StaleAttemptError        the writer's (attempt, generation) is no longer the current one
    │   ├── IllegalTransitionError   the state machine has no such edge
    │   ├── KeyReusedError           an idempotency key came back with another body
    │   └── HomeHeldError            another server or daemon holds this home
    ├── AuthError                the caller may not
    │   ├── UnauthorizedError        no token, or one that is not known
    │   └── ForbiddenError           a known token without that right
    ├── UnavailableError         try again later (retryable)
    │   ├── ServerAwayError          no server answers at the address
    │   ├── StoreBusyError           the database is locked or restarting
    │   └── StoreFullError           no space left for the database
    ├── SetupError               this machine is not ready
    │   ├── MissingExtraError        an optional dependency is not installed
    │   ├── MissingTorchError        the trial's interpreter has no torch
    │   ├── NetworkFilesystemError   the home is on a file system that cannot hold a database
    │   ├── PortTakenError           the port is in use by another program
    │   └── BadTokenFileError        the token file is unreadable, empty or open to others
    ├── DataError                a loader or data set that cannot be continued exactly
    │   ├── IndivisibleBatchError    global batch not divisible by ranks x micro batch
    │   └── DatasetChangedError      another length or fingerprint than at the save
    └── CheckpointError          a checkpoint that was not written or cannot be read
        ├── SaveFailedError          a save did not commit; earlier checkpoints stay usable
        │   └── SaveDiscardedError       the state changed while it was copied; the save is taken again
        ├── CorruptCheckpointError   a file is missing, truncated or does not match its hash
        ├── NoUsableCheckpointError  the place has content but nothing that can be restored
        └── FencedError              a newer attempt owns the checkpoint place
"""

from typing import Any, ClassVar


class OvernightError(Exception):
    """Root of every error that overnight raises on purpose.

    Args:
        message: What happened, in one sentence, with the value that was wrong.
        hint: What to do next. Empty when the message says it already.
        **details: JSON-able facts for programs.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def to_dict(self) -> dict[str, Any]:
        """The error as it crosses a process boundary."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "details": self.details,
        }


class BadInputError(OvernightError):
    """The caller can fix it."""

    code = "bad_input"


class InvalidSpecError(BadInputError):
    """A spec file or wire model does not validate."""

    code = "invalid_spec"


class InvalidParamsError(BadInputError):
    """Params have no canonical form."""

    code = "invalid_params"


class NotFoundError(BadInputError):
    """No such experiment, trial, sweep, device or node."""

    code = "not_found"


class UnsatisfiableError(BadInputError):
    """No node of the pool could ever give what the trial asks for."""

    code = "unsatisfiable"


class ScriptError(BadInputError):
    """The script is missing, unreadable or does not parse."""

    code = "script"


class RanksDisagreeError(BadInputError):
    """The ranks of a gang logged different things or are at different places of the script."""

    code = "ranks_disagree"


class BodyTooLargeError(BadInputError):
    """More bytes in one call than the server takes."""

    code = "body_too_large"


class RefusedError(BadInputError):
    """A rule of the house says no."""

    code = "refused"


class ConflictError(OvernightError):
    """The world moved on since the caller looked."""

    code = "conflict"


class StaleAttemptError(ConflictError):
    """The writer's (attempt, generation) is no longer the current one."""

    code = "stale_attempt"


class IllegalTransitionError(ConflictError):
    """The state machine has no such edge from the current state."""

    code = "illegal_transition"


class KeyReusedError(ConflictError):
    """An idempotency key came back with a different body."""

    code = "key_reused"


class HomeHeldError(ConflictError):
    """Another server or daemon holds this home."""

    code = "home_held"


class AuthError(OvernightError):
    """The caller may not."""

    code = "auth"


class UnauthorizedError(AuthError):
    """No token, or one that is not known."""

    code = "unauthorized"


class ForbiddenError(AuthError):
    """A known token without the right that this call needs."""

    code = "forbidden"


class UnavailableError(OvernightError):
    """Try again later."""

    code = "unavailable"
    retryable = True


class ServerAwayError(UnavailableError):
    """No server answers at the address."""

    code = "server_away"


class StoreBusyError(UnavailableError):
    """The database is locked or restarting."""

    code = "store_busy"


class StoreFullError(UnavailableError):
    """There is no space left for the database."""

    code = "store_full"


class SetupError(OvernightError):
    """This machine is not ready for what was asked."""

    code = "setup"


class MissingExtraError(SetupError):
    """An optional dependency is not installed.

    Args:
        what: What needed it, e.g. ``overnight up``.
        extra: The extra's name in pyproject.
    """

    code = "missing_extra"

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}'", hint=f"Install it: pip install 'overnight[{extra}]'")


class MissingTorchError(SetupError):
    """The interpreter that should run the trial has no torch."""

    code = "missing_torch"


class NetworkFilesystemError(SetupError):
    """The home is on a file system that cannot hold a database safely."""

    code = "network_filesystem"


class PortTakenError(SetupError):
    """The port is in use by another program."""

    code = "port_taken"


class BadTokenFileError(SetupError):
    """The token file is unreadable, empty, malformed or open to other users."""

    code = "bad_token_file"


class DataError(OvernightError):
    """A loader or data set that cannot be continued exactly."""

    code = "data"


class IndivisibleBatchError(DataError, BadInputError):
    """The global batch is not divisible by ranks x micro batch."""

    code = "indivisible_batch"


class DatasetChangedError(DataError):
    """The data set has another length or fingerprint than at the save."""

    code = "dataset_changed"


class CheckpointError(OvernightError):
    """A checkpoint that was not written or cannot be read."""

    code = "checkpoint"


class SaveFailedError(CheckpointError):
    """A save did not commit. Earlier checkpoints stay usable."""

    code = "save_failed"


class SaveDiscardedError(SaveFailedError):
    """The state was changed while it was copied; the next save copies it in another way."""

    code = "save_discarded"
    retryable = True


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, truncated or does not match its hash."""

    code = "corrupt_checkpoint"


class NoUsableCheckpointError(CheckpointError):
    """The checkpoint place has content, but nothing in it can be restored."""

    code = "no_usable_checkpoint"


class FencedError(CheckpointError):
    """A newer (attempt, generation) owns the checkpoint place."""

    code = "fenced"


def error_classes() -> dict[str, type[OvernightError]]:
    """Every error class by its code, to rebuild an error that came over the wire."""
    found: dict[str, type[OvernightError]] = {}
    pending: list[type[OvernightError]] = [OvernightError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


def from_dict(data: dict[str, Any]) -> OvernightError:
    """Rebuilds an error from :meth:`OvernightError.to_dict`; an unknown code becomes the root class."""
    cls = error_classes().get(str(data.get("code")), OvernightError)
    error = cls.__new__(cls)
    details = data.get("details")
    OvernightError.__init__(
        error, str(data.get("message", "")), str(data.get("hint", "")), **(details if isinstance(details, dict) else {})
    )
    return error

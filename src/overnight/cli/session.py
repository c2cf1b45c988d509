"""What every command shares: settings, consoles, the client, and how results and errors are printed."""

import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from errno import EACCES, EISDIR, ENOENT, ENOTDIR, EPERM, EROFS
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from overnight.core.errors import BadInputError, ConflictError, NotFoundError, OvernightError, ServerAwayError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from overnight.agents.client import Client
    from overnight.core.settings import Settings

FAILED, BAD_INPUT, AWAY, NOT_FOUND, TIME_UP, CONFLICT = 1, 2, 3, 4, 5, 6

EXIT_CODES = (
    "  0  done\n"
    "  1  something failed: a trial, a check, the command itself\n"
    "  2  the command line or the input is wrong\n"
    "  3  no server answers\n"
    "  4  no such trial, experiment, device ...\n"
    "  5  the time given to 'wait' is up\n"
    "  6  the state has moved on, or another process holds the home\n"
    "  130  Ctrl-C"
)

_BY_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (ServerAwayError, AWAY),
    (NotFoundError, NOT_FOUND),
    (ConflictError, CONFLICT),
    (BadInputError, BAD_INPUT),
)

WIDE = 400
"""Columns when nobody looks at the output through a terminal: nothing is cut."""


SILENT_SECONDS = 2.0
"""How long a command waits for the server without a word."""


class Trimmed:
    """A stream whose lines do not end in blanks: tables fill their last column, which a pipe need not see."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Writes without the blanks."""
        self._file.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Session:
    """One invocation of the command line. Everything is built when first used."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env = os.environ if env is None else env
        self.overrides: dict[str, Any] = {}
        self.json_output = False
        self._waits_for = ""

    @cached_property
    def settings(self) -> "Settings":
        """Settings from the environment, the home's ``overnight.toml`` and the command line."""
        from overnight.core.errors import InvalidSpecError
        from overnight.core.settings import build_settings

        settings = build_settings(self.env, **self.overrides)
        try:
            text = settings.paths.settings_file.read_text()
        except FileNotFoundError:
            return settings
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpecError(
                f"{settings.paths.settings_file} cannot be read: {error}",
                hint="It is optional, UTF-8 text that you may read: mend it or move it away.",
            ) from None
        return build_settings(self.env, text, **self.overrides)

    @cached_property
    def console(self) -> "Console":
        """Standard output."""
        return self._console(sys.stdout)

    @cached_property
    def notes(self) -> "Console":
        """Standard error: progress and remarks that a pipe must not get."""
        return self._console(sys.stderr)

    def _console(self, file: Any) -> "Console":
        from rich.console import Console

        width = None if file.isatty() or "COLUMNS" in self.env else WIDE
        file = file if file.isatty() else Trimmed(file)
        return Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)

    def client(self) -> "Client":
        """A client of the server that the settings mean."""
        from overnight.agents.client import Client
        from overnight.agents.retrying import RetryPolicy

        return Client(self.settings, retry=RetryPolicy(on_pause=self._note_wait))

    def _note_wait(self, error: OvernightError, seconds: float) -> None:
        """Says once what a command waits for, when that takes long."""
        if seconds < SILENT_SECONDS:
            self._waits_for = ""
        elif error.message != self._waits_for:
            self._waits_for = error.message
            # A server that is away comes back by itself, or the error at the end says how to start one.
            hint = "" if isinstance(error, ServerAwayError) else f" {error.hint}"
            self.note(f"waiting: {error.message}.{hint}")

    def emit(self, data: Any) -> None:
        """Prints the JSON envelope of a result: models, and lists and mappings of them."""
        self._print_json({"v": 1, "data": to_plain(data)})

    def _print_json(self, envelope: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(envelope) + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A remark on standard error."""
        from overnight.core.text import sanitize

        self.notes.print(sanitize(text), soft_wrap=True)

    def fail(self, error: Exception) -> int:
        """Prints an error in one or two lines; returns the exit code that goes with it."""
        if self.env.get("OVERNIGHT_DEBUG") == "1":
            traceback.print_exception(error)
        known = error if isinstance(error, OvernightError) else unexpected(error)
        if not (self.json_output and self._print_json_error(known)):
            self._print_error(known)
        return exit_code(error)

    def _print_json_error(self, error: OvernightError) -> bool:
        """Whether the envelope could be written: what fails may be standard output itself."""
        data = error.to_dict()
        try:
            self._print_json({"v": 1, "error": {k: data[k] for k in ("code", "message", "retryable", "hint")}})
        except OSError:
            return False
        return True

    def _print_error(self, error: OvernightError) -> None:
        from rich.text import Text

        from overnight.core.text import sanitize

        for label, style, text in (("error: ", "bold red", error.message), ("hint:  ", "bold", error.hint)):
            if text:
                self.notes.print(Text(label, style=style).append(sanitize(text, limit=4000), style=""), soft_wrap=True)


def exit_code(error: Exception) -> int:
    """The exit code that an error ends the command with."""
    return next((code for cls, code in _BY_ERROR if isinstance(error, cls)), FAILED)


def unexpected(error: Exception) -> OvernightError:
    """An error that nobody here raised on purpose, in our terms."""
    if isinstance(error, OSError) and error.filename and error.errno in (EACCES, EPERM, ENOENT, ENOTDIR, EISDIR, EROFS):
        return OvernightError(f"{error.filename}: {error.strerror}", hint="Check the path and its permissions.")
    if isinstance(error, OSError):
        return OvernightError(str(error) or type(error).__name__, hint="See what 'overnight doctor' says.")
    return OvernightError(
        f"unexpected {type(error).__name__}: {error}", hint="OVERNIGHT_DEBUG=1 shows where; please report it."
    )


def to_plain(data: Any) -> Any:
    """Models and what holds them as JSON values."""
    if hasattr(data, "model_dump"):
        model: BaseModel = data
        return model.model_dump(mode="json")
    if is_dataclass(data) and not isinstance(data, type):
        return to_plain(asdict(data))
    if isinstance(data, Mapping):
        return {str(key): to_plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [to_plain(item) for item in data]
    return str(data) if isinstance(data, Path) else data


def session_of(ctx: typer.Context) -> Session:
    """The session of the running command."""
    session = ctx.find_root().obj
    assert isinstance(session, Session)
    return session

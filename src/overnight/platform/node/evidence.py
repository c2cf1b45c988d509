"""What can be said about why a rank ended: its exception, out of memory, its last lines.

Standard library only: runs in the user's interpreter too.
"""

import re
from pathlib import Path
from typing import Any

from overnight.core.addresses import discreet

TRACEBACK_BYTES = 16 * 1024
MESSAGE_BYTES = 4 * 1024

_START = re.compile(r"^(\s*\+ Exception Group )?Traceback \(most recent call last\):$")
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: (?P<message>.*))?$")
_SYNTAX = re.compile(r'^  File ".*", line \d+$')
_CANNOT_OPEN = re.compile(r"can't open file .*: \[Errno \d+\] ")
_REFUSED = re.compile(r"^overnight: (?P<type>\w+): (?P<message>.*)$")
_NO_MODULE = re.compile(r"^\S+: No module named \S+$")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|unable to allocate .* for an array", re.IGNORECASE
)

_PEER_LOSS = re.compile(
    r"connection (was )?(likely )?(closed|reset|aborted)|broken pipe|socket closed|a peer has gone"
    r"|remote process exited|failed to recv, got 0 bytes|ncclRemoteError",
    re.IGNORECASE,
)


def error_from_log(lines: list[str]) -> dict[str, Any] | None:
    """The exception with which a Python program ended, read from the end of its output.

    Returns:
        ``type``, ``message``, ``traceback``, ``step`` (None); or None when the output ends in no exception.
    """
    start = _last(lines, _START.match)
    if start is None:
        return _short_error(lines)
    for index in range(start + 1, len(lines)):
        line = lines[index]
        match = None if line.startswith((" ", "\t")) or not line.strip() else _EXCEPTION.match(line)
        if match is None:
            continue
        message = "\n".join([match["message"] or "", *_more(lines[index + 1 :])]).strip()
        return make_error(match["type"], message, "\n".join(lines[start : index + 1]))
    return None


def _short_error(lines: list[str]) -> dict[str, Any] | None:
    """Errors that Python, or our own start of the program, prints without a traceback header."""
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if refused := _REFUSED.match(line):
            return make_error(refused["type"], refused["message"])
        if _CANNOT_OPEN.search(line):
            return make_error("FileNotFoundError", line)
        if _NO_MODULE.match(line):
            return make_error("ModuleNotFoundError", line)
    start = _last(lines, _SYNTAX.match)
    if start is not None:  # a syntax error in the script itself
        for line in lines[start + 1 :]:
            match = _EXCEPTION.match(line)
            if match and match["type"] in ("SyntaxError", "IndentationError", "TabError"):
                return make_error(match["type"], match["message"] or "", "\n".join(lines[start:]))
    return None


def _last(lines: list[str], matches: Any) -> int | None:
    return next((i for i in range(len(lines) - 1, -1, -1) if matches(lines[i])), None)


def _more(rest: list[str]) -> list[str]:
    """Further lines of a message: exceptions of torch span several."""
    lines = []
    for line in rest[:20]:
        if _START.match(line) or line.startswith("During handling"):
            break
        lines.append(line)
    return lines


def make_error(kind: str, message: str, traceback: str = "", step: int | None = None) -> dict[str, Any]:
    """An ``error`` of the exit event, without passwords in URLs, cut to a bounded size."""
    return {
        "type": kind[:250],
        "message": discreet(message)[:MESSAGE_BYTES],
        "traceback": discreet(traceback)[-TRACEBACK_BYTES:],
        "step": step,
    }


def is_out_of_memory(error: dict[str, Any] | None) -> bool:
    """Whether an exception says that host or device memory ran out."""
    if error is None:
        return False
    name = str(error["type"]).rpartition(".")[2]
    return name in ("MemoryError", "OutOfMemoryError", "_ArrayMemoryError") or (
        name in ("RuntimeError", "AcceleratorError", "CudaError") and bool(_OUT_OF_MEMORY.search(str(error["message"])))
    )


def is_peer_loss(error: dict[str, Any] | None) -> bool:
    """Whether an exception only says that another rank is gone: gloo and NCCL tell it by the text alone."""
    return error is not None and bool(_PEER_LOSS.search(str(error["message"])))


def oom_kills() -> int:
    """How many processes this machine's kernel has killed for memory, ever; 0 when it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0

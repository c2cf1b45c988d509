"""Small files that another process may read at any moment: written whole or not at all.

Standard library only: runs in the user's interpreter too.
"""

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str, *, durable: bool = False, mode: int = 0o600) -> None:
    """Replaces a file. A reader sees the old content or the new, never a part.

    Args:
        path: The file.
        text: The new content.
        durable: Also survive the machine.
        mode: Permissions.

    Raises:
        OSError: The disk is full or the folder is gone; the old file stays.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(descriptor, data) :]
        if durable:
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """:func:`write_atomic` of a JSON value."""
    write_atomic(path, json.dumps(value, separators=(",", ":"), allow_nan=False), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when the file is missing or holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None

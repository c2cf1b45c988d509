"""The boot line: runs a part of the node in any interpreter, from this installation's own files.

The user's interpreter need not have overnight installed, or may have another version of it. The package is loaded by
an importlib spec under its own name, so that ``sys.path`` (which decides what the *script* imports) stays untouched;
``-P`` keeps the working directory off it.

Standard library only: runs in the user's interpreter too.
"""

import json
import sys
from pathlib import Path
from typing import Any

import overnight

PACKAGE_DIR = Path(overnight.__file__).resolve().parent

BOOT_LINE = (
    "import sys,json,importlib.util as u;"
    "p=sys.argv[1];"
    "s=u.spec_from_file_location('overnight',p+'/__init__.py',submodule_search_locations=[p]);"
    "m=u.module_from_spec(s);sys.modules['overnight']=m;s.loader.exec_module(m);"
    "from overnight.platform.node.boot import start;"
    "start(sys.argv[2],json.loads(sys.argv[3]))"
)


def command(python: str, role: str, message: dict[str, Any]) -> list[str]:
    """The command line that starts a role.

    Args:
        python: The interpreter.
        role: ``zygote`` or ``supervisor``.
        message: What the role's ``main`` takes.
    """
    return [python, "-P", "-c", BOOT_LINE, str(PACKAGE_DIR), role, json.dumps(message)]


def start(role: str, message: dict[str, Any]) -> None:
    """Becomes a role. Called by the boot line."""
    sys.dont_write_bytecode = True
    if role == "zygote":
        from overnight.platform.node import zygote

        zygote.main(message)
    else:
        from overnight.platform.node import supervisor

        supervisor.main(message)

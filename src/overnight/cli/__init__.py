"""The command line: thin, it parses, calls and prints. ``main`` is the entry point.

This file parses under Pythons that are too old for the rest, so that they get an answer instead of a SyntaxError.
"""

import sys

REQUIRED = (3, 11)


def main():  # type: ignore[no-untyped-def]  # annotations would have to suit old Pythons too
    """Runs the command line and leaves with its exit code."""
    if sys.version_info < REQUIRED:
        sys.stderr.write(
            f"error: overnight needs Python {REQUIRED[0]}.{REQUIRED[1]} or newer; {sys.executable} is too old\n"
            "hint:  Install it into a newer one: python3.11 -m venv .venv; .venv/bin/pip install 'overnight[server]'\n"
        )
        sys.exit(2)
    from overnight.cli.app import run

    sys.exit(run(sys.argv[1:]))

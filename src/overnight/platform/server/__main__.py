"""``python -m overnight.platform.server --home DIR``: the server alone, as `overnight up` starts it."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from overnight.core.errors import OvernightError
from overnight.core.settings import Settings, build_settings
from overnight.core.text import sanitize
from overnight.platform.server.exits import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns its exit code (see :mod:`overnight.platform.server.exits`)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("alembic", "apscheduler", "httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        settings = _settings(argv)
        from overnight.platform.server.process import serve

        serve(settings)
    except OvernightError as error:
        print(f"overnight server: {sanitize(str(error))}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


def _settings(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog="overnight-server", description="The overnight server alone.")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given = vars(parser.parse_args(argv))
    first = build_settings(os.environ, **given)
    text = first.paths.settings_file.read_text() if first.paths.settings_file.is_file() else ""
    return build_settings(os.environ, text, **given)


if __name__ == "__main__":
    sys.exit(main())

"""Runs training scripts in ranks that are forked from one warm process, shared by all test files of a session."""

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Lab:
    """Runs orders in forks of one warm process."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env = {k: v for k, v in env.items() if not k.startswith("OVERNIGHT_")}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trainer_lab.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self._answer() == {"threads": 1}

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the lab died"
        return json.loads(line)

    def run(
        self,
        script: Path,
        folder: Path,
        *argv: str,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> list[int]:
        """Runs a script in ``folder``, with its output in the file ``log`` there.

        Args:
            script: The script.
            folder: Its working directory; made.
            argv: Its arguments.
            ranks: How many processes run it.
            env: Added to the environment.
            imports: Modules that take long to import, for the warm process, so that not every start pays for them.

        Returns:
            Exit codes of the ranks; a negative one is a signal.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {
            "script": str(script),
            "argv": list(argv),
            "cwd": str(folder),
            "env": env or {},
            "ranks": ranks,
            "log": str(folder / "log"),
            "imports": list(imports),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        statuses: list[int] = self._answer()
        return statuses

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@functools.cache
def shared_lab() -> Lab:
    """The one lab of this test session."""
    lab = Lab()
    atexit.register(lab.close)
    return lab

"""What an import costs and drags in, seen from fresh interpreters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import overnight

PACKAGE = Path(overnight.__file__).parent
HEAVY = {"torch", "mlflow", "sqlalchemy", "fastapi", "textual", "optuna", "ray", "pandas"}


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_overnight_is_free() -> None:
    assert not loaded_by("import overnight") & (HEAVY | {"httpx", "pydantic", "typer"})


def test_the_client_needs_no_server_parts() -> None:
    assert not loaded_by("from overnight import Client") & HEAVY


def test_the_dashboard_needs_no_server_parts() -> None:
    assert not loaded_by("import overnight.tui.app") & (HEAVY - {"textual"})


def test_the_trainer_needs_neither_server_parts_nor_pydantic() -> None:
    loaded = loaded_by("from overnight import trainer; trainer.run, trainer.DataLoader, trainer.inspect")
    assert "torch" in loaded
    assert not loaded & ((HEAVY | {"pydantic", "httpx"}) - {"torch"})


def test_the_server_loads_neither_torch_nor_mlflow() -> None:
    assert not loaded_by("import overnight.platform.server.app") & {"torch", "mlflow", "optuna", "textual"}


def test_what_runs_in_a_users_interpreter_is_standard_library_only() -> None:
    modules = ("supervisor", "zygote", "reaper", "spool", "tail", "wire", "mlflow_endpoint")
    statement = "\n".join(f"import overnight.platform.node.{name}" for name in modules)
    assert not loaded_by(statement) & (HEAVY | {"pydantic", "httpx", "numpy"})


@pytest.mark.parametrize("folder", [PACKAGE.parent, PACKAGE.parents[1]], ids=["src", "root"])
def test_no_folder_on_the_path_shadows_the_standard_library(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import platform; print(platform.python_implementation())"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "CPython", done.stderr

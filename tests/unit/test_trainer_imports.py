"""What importing parts of the trainer brings along, seen from fresh interpreters."""

import json
import subprocess
import sys

import pytest

from overnight import trainer

SERVER_PARTS = {"pydantic", "httpx", "sqlalchemy", "mlflow", "fastapi", "textual", "optuna", "pandas"}


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps([m.partition('.')[0] for m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_reading_sample_records_needs_no_torch() -> None:
    statement = "from overnight.trainer.data.record import audit; from overnight import trainer; trainer.Yielded"
    assert not loaded_by(statement) & (SERVER_PARTS | {"torch"})


def test_all_that_a_script_needs_comes_without_server_parts() -> None:
    loaded = loaded_by("import overnight.trainer.execution")
    assert "torch" in loaded and not loaded & SERVER_PARTS


def test_public_names_are_there_when_asked_for() -> None:
    assert set(trainer.__all__) <= set(dir(trainer))
    for name in trainer.__all__:
        assert getattr(trainer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        trainer.Trainer  # type: ignore[attr-defined]  # noqa: B018

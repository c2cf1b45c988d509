"""What holds for all tests: an example takes as long as a busy machine needs; pytest's own time limit is the judge."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from store_lab import Store

# Hundreds of interpreters import the same sources, and every worker rewrites the same assertions: once is enough.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("overnight", deadline=None)
settings.load_profile("overnight")


def pytest_collection() -> None:
    """Nothing that comes with the modules of a whole suite is garbage: to look for it takes as long as to collect."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What tests leave is looked for among what tests made; threads of torch's own would wait for each other busily."""
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def store_server() -> "Iterator[Store]":
    """An S3 server of this process; imported only where it is wanted."""
    from store_lab import running_store

    with running_store() as store:
        yield store


@pytest.fixture
def store(store_server: "Store", monkeypatch: pytest.MonkeyPatch) -> "Iterator[Store]":
    """A store for one test: nothing fails, and its credentials are in the environment."""
    from store_lab import lent

    with lent(store_server, monkeypatch.setenv) as store:
        yield store

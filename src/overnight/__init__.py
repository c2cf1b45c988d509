"""overnight runs PyTorch experiments while people sleep.

Importing this package is free: it loads neither torch, mlflow nor sqlalchemy. ``overnight.trainer`` is what a
training script imports; ``overnight.Client`` and ``overnight.AsyncClient`` talk to a running server.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from overnight.agents.client import AsyncClient, Client


def __getattr__(name: str) -> Any:
    if name in ("Client", "AsyncClient"):
        return getattr(importlib.import_module("overnight.agents.client"), name)
    raise AttributeError(f"module 'overnight' has no attribute {name!r}")

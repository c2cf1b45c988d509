"""Versions on which the last bits of a computation may depend; apart, since asking for them imports torch and numpy."""

import platform

import numpy
import torch

from overnight import __version__


def versions() -> dict[str, str]:
    """Of python, torch, numpy and overnight."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "overnight": __version__,
    }

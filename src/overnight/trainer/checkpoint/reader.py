"""The public names of :mod:`overnight.trainer.checkpoint.reading`."""

from overnight.trainer.checkpoint.reading.finding import complain, newest_good, open_newest
from overnight.trainer.checkpoint.reading.inspection import inspect
from overnight.trainer.checkpoint.reading.lineage import lineage
from overnight.trainer.checkpoint.reading.restored import Restored

__all__ = ["Restored", "complain", "inspect", "lineage", "newest_good", "open_newest"]

"""The janitor: deletes checkpoints that nobody needs any more, where and when nobody can be at work on them."""

from overnight.platform.janitor.janitor import Janitor

__all__ = ["Janitor"]

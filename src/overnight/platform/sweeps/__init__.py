"""Sweeps: the planner asks, the queue is kept filled without a barrier, schedules start sweeps again."""

from overnight.platform.sweeps.service import SweepService

__all__ = ["SweepService"]

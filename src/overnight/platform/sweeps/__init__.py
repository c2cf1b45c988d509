"""Sweeps: the planner asks, the queue is kept filled without a barrier, schedules start sweeps again."""

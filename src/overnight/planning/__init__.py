"""Planners, pruners and judgement: pure functions of what they are given."""

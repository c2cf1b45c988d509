"""Planners, pruners and judgement: pure functions of what they are given.

Planners run in child processes (``python -m overnight.planning``), so that a bad one cannot hurt the server.
"""

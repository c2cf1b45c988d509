"""Copying the state of one moment into memory that the writer process shares, without holding up training.

At a boundary everything that training may change at any time is copied at once. What only a tracked optimizer changes
(parameters and its own state) is copied while the next forward and backward run, and a hook before every optimizer's
step waits for the end of that. Random blocks, taken at the boundary, tell whether the assumption held.
"""

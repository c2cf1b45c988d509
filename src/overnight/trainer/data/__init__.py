"""The order, position and content of what a trial trains on, as pure functions of (seed, epoch, position)."""

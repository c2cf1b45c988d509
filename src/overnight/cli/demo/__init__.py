"""``overnight demo``: the main job end to end, through faults, in a temporary home."""

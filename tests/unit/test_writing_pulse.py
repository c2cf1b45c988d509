"""Signs of life between two processes: what is read was written, never a number that is half there."""

import itertools
import os
import signal

from overnight.trainer.checkpoint.writing.channel import Pulse


def test_a_pulse_that_beats_is_never_read_as_one_that_has_not_begun() -> None:
    """A writer process of which that was read was taken for stalled, and killed in the middle of a save."""
    pulse = Pulse.make()
    pulse.enter("writing")
    pulse.beat(1)
    child = os.fork()
    if child == 0:
        try:
            for beats in itertools.count(2):
                pulse.beat(beats)
        finally:
            os._exit(1)
    try:
        seen = [pulse.read() for _ in range(200_000)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pulse.close()
    assert seen[-1][0] > 1
    assert all(beats > 0 and progress == 1 and stage == "writing" for beats, progress, stage in seen)
    assert [beats for beats, _, _ in seen] == sorted(beats for beats, _, _ in seen)

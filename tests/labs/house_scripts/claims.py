"""Each process of a trial holds a file lock for its device: two at once are noticed by the later one, which fails.

The lock passes on to children, so that a survivor of a trial keeps the device claimed.
"""

import fcntl
import json
import os
import pathlib


def claim():
    """Takes the lock of this rank's device, or ends the program with an error that says whose it is."""
    attempt_dir = os.environ.get("OVERNIGHT_ATTEMPT_DIR")
    if attempt_dir is None:
        return
    order = json.loads((pathlib.Path(attempt_dir) / "order.json").read_text())
    device = order["devices"][int(os.environ["LOCAL_RANK"]) % len(order["devices"])]
    folder = pathlib.Path(os.environ["HOUSE_CLAIMS"])
    fd = os.open(folder / f"device-{device['index']}", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(fd, True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(fd, 200, 0).decode()
        raise SystemExit(f"device {device['index']} is still in use by {other}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.environ['OVERNIGHT_TRIAL_NAME']} attempt {os.environ['OVERNIGHT_ATTEMPT']}".encode(), 0)

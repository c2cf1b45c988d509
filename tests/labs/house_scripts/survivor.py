"""Ends well, and leaves a child in a session of its own that ignores every polite signal and keeps the device."""

import os
import pathlib
import signal
import time

import claims

claims.claim()
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.write(writer, b"ready")
    while True:
        time.sleep(1.0)
os.read(reader, 5)
pathlib.Path(os.environ["OVERNIGHT_TRIAL_DIR"], "done").touch()

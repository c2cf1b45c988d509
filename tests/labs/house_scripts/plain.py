"""Knows nothing of overnight: starts over when it is started again, and prints its result."""

import argparse
import time

import claims

parser = argparse.ArgumentParser()
parser.add_argument("--start", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--pause", type=float, default=0.02)
args = parser.parse_args()

claims.claim()
value = args.start
for step in range(1, args.steps + 1):
    value = 3.9 * value % 1.0
    if step % 10 == 0:
        print(f"step {step} score={value:.9f}", flush=True)
    time.sleep(args.pause)

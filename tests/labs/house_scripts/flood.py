"""One line of 100 MB, as many short ones, and then a result."""

import sys

import claims

claims.claim()
piece = "x" * 1_000_000
for _ in range(100):
    sys.stdout.write(piece)
sys.stdout.write("\n")
lines = "".join(f"line {n} of a flood that nobody reads\n" for n in range(25_000))
for _ in range(100):
    sys.stdout.write(lines)
print("step 1 score=0.5", flush=True)

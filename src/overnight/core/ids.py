"""Identifiers: a prefix that says what it is, then time and randomness, so that ids sort by age and never collide."""

import secrets
import time
from collections.abc import Callable

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 (https://www.crockford.com/base32.html): no i, l, o, u."""

PREFIXES = {
    "experiment": "exp",
    "proposal": "prop",
    "trial": "tri",
    "attempt": "att",
    "sweep": "swp",
    "node": "node",
    "token": "tok",
}

IdFactory = Callable[[str], str]


def _base32(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        value, digit = divmod(value, 32)
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def new_id(kind: str) -> str:
    """A fresh id such as ``tri-01kb8xq4m3f9x2k7``.

    48 bits of milliseconds and 40 bits of randomness: two of a million ids made in the same millisecond
    collide with a chance below one half; the store's primary keys catch it and the caller draws again.

    Args:
        kind: A key of :data:`PREFIXES`.
    """
    return f"{PREFIXES[kind]}-{_base32(time.time_ns() // 1_000_000, 10)}{_base32(secrets.randbits(40), 8)}"

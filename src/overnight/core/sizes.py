"""Amounts of bytes, as people write and read them."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes in ``"50GB"``, ``"1.5 TiB"``, ``"200M"`` or ``"4096"``.

    Raises:
        ValueError: Anything else, or nothing at all.
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else (_UNITS | _BINARY).get(match[2].lower())
    if match is None or unit is None or (amount := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"{text!r} is no amount of bytes: write 50GB, 1.5TiB or 200MB")
    return amount


def show_bytes(amount: float) -> str:
    """``1.5 GB``: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} PB"

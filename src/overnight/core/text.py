"""Foreign text made harmless: names, params, logs and errors may hold escape sequences or bidi tricks."""

import re

_SEQUENCES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: window titles, hyperlinks
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"  # other escapes
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ufeff]")


def sanitize(text: str, *, limit: int | None = None, one_line: bool = False) -> str:
    """Text that is safe to show in a terminal or a page, still readable.

    Args:
        text: Anything.
        limit: Longest result in characters; longer text ends in an ellipsis.
        one_line: Replace newlines and tabs by a space.
    """
    text = _CONTROLS.sub("\ufffd", _SEQUENCES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    if one_line:
        text = re.sub(r"[\n\t]+", " ", text)
    if limit is not None and len(text) > limit:
        text = text[: max(0, limit - 1)] + "…"
    return text

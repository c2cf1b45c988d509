"""How the server's process ends when it cannot start: `overnight up` must know what a restart would not cure."""

from overnight.core import errors as e

OTHER = 1

EXIT_CODES: tuple[tuple[type[e.OvernightError], int], ...] = (
    (e.HomeHeldError, 10),
    (e.PortTakenError, 11),
    (e.NetworkFilesystemError, 12),
    (e.StoreFullError, 13),
    (e.BadTokenFileError, 14),
    (e.StoreBusyError, 15),
    (e.SetupError, 17),
    (e.BadInputError, 18),
)
"""The first class that fits decides."""

CURABLE = frozenset({13, 15})
"""Codes after which trying again later can help: space comes back, a lock is released."""


def exit_code(error: e.OvernightError) -> int:
    """The exit code for an error at start."""
    return next((code for cls, code in EXIT_CODES if isinstance(error, cls)), OTHER)


def is_final(code: int) -> bool:
    """Whether a server that ended with this code would end the same way again."""
    return code >= 10 and code not in CURABLE


def error_of(code: int) -> type[e.OvernightError]:
    """The class of error that an exit code stands for."""
    return next((cls for cls, known in EXIT_CODES if known == code), e.SetupError)

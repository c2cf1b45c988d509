"""The server's process: what may keep it from starting comes first, and needs none of what takes a second to import."""

from contextlib import ExitStack

from overnight.core.errors import SetupError
from overnight.core.settings import Settings
from overnight.platform.identity import held
from overnight.platform.server.listen import open_socket
from overnight.platform.server.tokens import TokenBook, check_bind, ensure_token


def serve(settings: Settings) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Raises:
        HomeHeldError: Another server holds the home.
        BadTokenFileError, PortTakenError, NetworkFilesystemError, StoreFullError, StoreBusyError, SetupError:
            It cannot start; the message says why and the hint what to do.
    """
    prepare_home(settings)
    with ExitStack() as stack:
        lock = stack.enter_context(held(settings.paths.server_lock, "server"))
        tokens = TokenBook(ensure_token(settings.paths.token_file))
        check_bind(settings.host, tokens)
        listener = stack.enter_context(open_socket(settings))
        from overnight.platform.server.serving import answer

        answer(settings, lock, tokens, listener)


def prepare_home(settings: Settings) -> None:
    """Makes the home's folders.

    Raises:
        SetupError: That is not possible.
    """
    home = settings.paths
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (home.logs, home.code):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the home {home.root} cannot be used: {error.strerror}",
            hint="Choose a folder that you may write to: OVERNIGHT_HOME=/path overnight up",
        ) from None

"""``python -m overnight.platform.node``: the node daemon. Detaches first, then imports and serves."""

import argparse
import contextlib
import os
import sys
from pathlib import Path


def main() -> int:
    """Parses, detaches if asked to report on a pipe, serves."""
    parser = argparse.ArgumentParser(prog="python -m overnight.platform.node", description="The node daemon of a home.")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--pool", help="nvml[:0-3,7], cpu:N or fake:N")
    parser.add_argument("--name", help="the node's name; default: the host's")
    parser.add_argument(
        "--idle-seconds", type=float, default=600.0, help="leave after this long without server and work"
    )
    parser.add_argument(
        "--ready-fd", type=int, help="go into the background; say on this descriptor how the start went"
    )
    parser.add_argument("--cold", action="store_true", help="start no warm process before the first order")
    parser.add_argument(
        "--term-seconds", type=float, default=10.0, help="what ranks that were told to leave have after SIGTERM"
    )
    options = parser.parse_args()
    if options.ready_fd is not None:
        if os.fork():
            os._exit(0)  # the starter waits for this process only
        os.setsid()
    return _serve(options)


def _serve(options: argparse.Namespace) -> int:
    import asyncio
    import logging
    import socket

    from overnight.core.errors import HomeHeldError, OvernightError
    from overnight.core.paths import Home
    from overnight.platform.identity import LockFile
    from overnight.platform.node.control import make_socket_dir
    from overnight.platform.node.daemon import Daemon
    from overnight.platform.pools import open_pool

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    home = Home(options.home.absolute())
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        home.logs.mkdir(exist_ok=True)
        make_socket_dir(home.socket_dir)
        pool = open_pool(options.pool, home)
        lock = LockFile.acquire(home.node_lock, "node daemon", socket=str(home.node_socket))
    except HomeHeldError as error:
        _say(options.ready_fd, str(error))
        return 3
    except (OvernightError, OSError) as error:
        _say(options.ready_fd, str(error))
        return 1
    daemon = Daemon(
        home,
        pool,
        lock,
        options.name or socket.gethostname(),
        idle_seconds=options.idle_seconds,
        prewarm=not options.cold,
        term_seconds=options.term_seconds,
    )

    async def run() -> None:
        asyncio.get_running_loop().call_later(0, _say, options.ready_fd, "ready")
        await daemon.run()

    asyncio.run(run())
    with contextlib.suppress(OSError):
        lock.release()
    return 0


def _say(descriptor: int | None, text: str) -> None:
    if descriptor is None:
        print(text, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode() + b"\n")
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())

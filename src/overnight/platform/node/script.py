"""Executes the user's script or module inside a warm process, as ``python script.py`` would have.

What a fork shares with its parent and must not is made anew here: random state, multiprocessing's key and start method,
temporary names, thread counts. The script's ``__main__`` is a fresh module that stays (background threads may still
use it while the interpreter ends).

Standard library only: runs in the user's interpreter too.
"""

import atexit
import builtins
import contextlib
import importlib.util
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn


def run(order: dict[str, Any]) -> NoReturn:
    """Runs ``order['kind']`` (``script`` or ``module``), then ends the process with Python's exit code."""
    sys.dont_write_bytecode = True
    sys.orig_argv = list(order["words"])
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    tempfile.tempdir = None
    _set_threads(int(order["threads"]))
    start = _prepare_module if order["kind"] == "module" else _prepare_script
    try:
        main, code = start(order["target"], list(order["argv"]))
        exec(code, main.__dict__)
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:
        status = _show(error)
    else:
        status = 0
    _end(status)


def make_anew() -> None:
    """Makes anew what a fork shares and must not. Done while waiting for an order, as it costs page faults."""
    multiprocessing.set_start_method(None, force=True)
    current = multiprocessing.current_process()
    current.authkey = os.urandom(32)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    _set_threads(1)
    threadpoolctl = sys.modules.get("threadpoolctl")
    if threadpoolctl is not None:
        global _pools
        _pools = threadpoolctl.ThreadpoolController()


def rehearse() -> None:
    """Goes through the preparation of a script that is not there, and leaves no trace of it."""
    path = Path("train.py").absolute()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path.parent.resolve()), __loader__=SourceFileLoader("__main__", str(path)))
    exec(compile("import sys\nx = [1]\n", str(path), "exec", dont_inherit=True), main.__dict__)


_pools: Any = None
"""The thread pools of the libraries that the warm process has loaded; finding them takes some milliseconds."""


def _set_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    if threads > 1 and _pools is not None:
        # The warm process loaded its BLAS with one thread, to stay single-threaded.
        _pools.limit(limits=threads, user_api="blas")


def _fresh_main(file: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    return main


def _prepare_script(target: str, argv: list[str]) -> tuple[types.ModuleType, types.CodeType]:
    path = Path(target).absolute()
    sys.argv = [target, *argv]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        source = path.read_bytes()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {str(path)!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main = _fresh_main(str(path))
    main.__loader__ = SourceFileLoader("__main__", str(path))
    return main, compile(source, str(path), "exec", dont_inherit=True)


def _prepare_module(target: str, argv: list[str]) -> tuple[types.ModuleType, types.CodeType]:
    sys.argv = ["-m", *argv]
    sys.path.insert(0, str(Path.cwd()))
    spec = _find(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{target}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        sys.stderr.write(f"{sys.executable}: No module named {target}\n")
        raise SystemExit(1)
    main = _fresh_main(str(spec.origin))
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    sys.argv[0] = str(spec.origin)
    return main, code


def _find(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> int:
    """Prints a traceback that begins in the user's own file."""
    here = __file__
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == here:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    with contextlib.suppress(BaseException):
        sys.excepthook(type(error), error, traceback)
    if isinstance(error, KeyboardInterrupt):
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _end(status: int) -> NoReturn:
    """What the interpreter does at its end, without unwinding into the process that forked us."""
    run_handlers: Callable[[], None] = atexit._run_exitfuncs
    steps: list[Callable[[], Any]] = [
        threading._shutdown,  # type: ignore[attr-defined]
        run_handlers,
        sys.stdout.flush,
        sys.stderr.flush,
    ]
    for step in steps:
        with contextlib.suppress(BaseException):
            step()
    os._exit(status & 0xFF)

"""Worker processes that read ahead, end with their parent, and never outlive or interrupt it.

torch's own worker machinery does the transport (shared memory, pinning, order). What it lacks here:

* A signal to the process group (a terminal's Ctrl-C, a scheduler's SIGTERM) kills its workers, and the training loop
  raises before it reaches the boundary at which it wanted to save. Ours ignore SIGTERM, SIGINT and SIGUSR1.
* Its workers look for their parent every 5 s, and only between tasks. Ours end with it, whatever they are doing.
* Since ours ignore SIGTERM, a stuck one must be killed, or the interpreter's exit would wait for it for ever.
* A dead worker is reported as :class:`DataError` with a way out.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from overnight.core.errors import DataError
from overnight.trainer.data.augment import SampleReader, Task

CLOSE_GRACE_SECONDS = 5.0
"""How long workers may finish what they are reading before they are killed."""

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
_WORKER_FAULTS = ("killed by signal", "exited unexpectedly", "timed out")


@dataclass(frozen=True)
class WorkerOptions:
    """How samples are read; the names and meanings are those of ``torch.utils.data.DataLoader``."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0.0


@dataclass(frozen=True)
class WorkerSetup:
    """Runs first in every worker. Picklable, for start methods that do not fork.

    Attributes:
        user_init: The user's own ``worker_init_fn``.
        from_main_thread: Whether the main thread starts the worker.
    """

    user_init: Callable[[int], None] | None
    from_main_thread: bool

    def __call__(self, worker_id: int) -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        _die_with_parent(self.from_main_thread)
        if self.user_init is not None:
            self.user_init(worker_id)


def _die_with_parent(from_main_thread: bool) -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # The kernel's signal comes when the *thread* that forked us ends, and under a fork server our parent is the server.
    if sys.platform == "linux" and from_main_thread and os.getppid() == parent.pid:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:
            os._exit(1)
    else:
        threading.Thread(target=_exit_after, args=[parent], daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


class BatchReader:
    """Turns tasks into batches, in order, here or in worker processes.

    Args:
        reader: Reads one task. Pickled to workers if they are not forked.
        options: Number of workers and how they work.
        seed: Of the workers' own generators, which only matter to data sets that are not seeded per sample.
    """

    def __init__(self, reader: SampleReader, options: WorkerOptions, seed: int) -> None:
        self._reader = reader
        self._options = options
        self._seed = seed
        self._source = _TaskSource()
        self._loader: Any = None

    def read(self, tasks: Iterator[Task]) -> Iterator[Any]:
        """One batch per task. With workers, tasks are taken from the iterator ahead of time.

        Raises:
            DataError: A worker died or was silent for longer than ``timeout``.
        """
        if not self._options.num_workers and not self._options.pin_memory:
            for task in tasks:
                yield self._reader[task]
            return
        self._source.tasks = tasks
        iterator = self._start()
        try:
            yield from _translated(iterator)
        except DataError:
            self._loader = None
            _close(iterator)
            raise
        finally:
            if not self._options.persistent_workers:
                _close(iterator)

    def _start(self) -> Any:
        if self._loader is None:
            self._loader = self._torch_loader()
        with _signals_held():
            iterator = iter(self._loader)
        _Pools.watch(iterator)
        return iterator

    def _torch_loader(self) -> Any:
        options = self._options
        in_main_thread = threading.current_thread() is threading.main_thread()
        return torch.utils.data.DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._source,
            collate_fn=_unchanged,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
            multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
            worker_init_fn=WorkerSetup(options.worker_init_fn, in_main_thread),
            timeout=options.timeout,
            generator=torch.Generator().manual_seed(self._seed),
        )

    def close(self) -> None:
        """Ends persistent workers."""
        loader, self._loader = self._loader, None
        if loader is not None and loader._iterator is not None:
            _close(loader._iterator)


class _TaskSource(Iterable[Task]):
    """What torch takes for the sampler: it hands out the tasks of the current reading."""

    tasks: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.tasks


class _Pools:
    """The workers of this process that are alive, so that its exit does not wait for a stuck one."""

    _live: dict[int, Any] = {}
    _inherited: list[Any] = []
    _watches = False

    @classmethod
    def watch(cls, iterator: Any) -> None:
        # Registered late, and again in a forked child, because a warm parent clears its exit handlers before it forks,
        # and because handlers run last in first out: ours must come before multiprocessing joins its children.
        if not cls._watches:
            cls._watches = True
            atexit.register(cls.kill_all)
        if _processes(iterator):
            cls._live[id(iterator)] = iterator

    @classmethod
    def forget(cls, iterator: Any) -> bool:
        """Whether its workers were alive until now, and were started by this process."""
        return cls._live.pop(id(iterator), None) is not None

    @classmethod
    def kill_all(cls) -> None:
        for iterator in list(cls._live.values()):
            if cls.forget(iterator):
                _kill(_processes(iterator))
                _shut_down(iterator)

    @classmethod
    def disown(cls) -> None:
        """In a forked child: the workers are its parent's.

        Torch ends the workers of an iterator that is collected, so these never are; and multiprocessing those that it
        takes for this process's, when it exits.
        """
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        for iterator in cls._live.values():
            children.difference_update(_processes(iterator))
        cls._inherited += cls._live.values()
        cls._live, cls._watches = {}, False


os.register_at_fork(after_in_child=_Pools.disown)


def _unchanged(data: Any) -> Any:
    return data


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Children start with these signals blocked and unblock them once they ignore them: no moment is unprotected."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _translated(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            if not any(fault in str(error) for fault in _WORKER_FAULTS):
                raise
            raise DataError(
                f"a loader worker did not answer: {str(error).splitlines()[0]}",
                hint=(
                    "A worker that was killed has often met a memory limit: use fewer workers or smaller batches. "
                    "If it timed out, raise timeout= or set num_workers=0 to see the error in the main process."
                ),
            ) from error
        yield batch


def _processes(iterator: Any) -> list[multiprocessing.Process]:
    return list(getattr(iterator, "_workers", ()))


def _close(iterator: Any) -> None:
    """Lets the workers finish, kills those that do not within the grace. Does nothing the second time."""
    if not _Pools.forget(iterator):
        return
    killer = threading.Timer(CLOSE_GRACE_SECONDS, _kill, [_processes(iterator)])
    killer.daemon = True
    killer.start()
    try:
        _shut_down(iterator)
    finally:
        killer.cancel()


def _shut_down(iterator: Any) -> None:
    workers = _processes(iterator)
    try:
        # torch reports every killed worker, also one that we kill here on purpose.
        with contextlib.suppress(RuntimeError):
            iterator._shutdown_workers()
    finally:
        _kill(workers)
    for worker in workers:
        worker.join()


def _kill(workers: Iterable[multiprocessing.Process]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()

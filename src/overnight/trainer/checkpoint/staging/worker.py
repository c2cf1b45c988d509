"""One thread that does, in order, what need not happen in the loop."""

import queue
import threading
from collections.abc import Callable


class Worker:
    """A thread that lives from its first task to :meth:`close`.

    One for all tasks: a process that is told to die with its parent dies with the *thread* that started it.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Queues a task, which must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task()
            del task  # with all that it refers to, instead of keeping it until the next one comes

    def close(self) -> None:
        """Ends the thread behind the tasks that are queued. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join()

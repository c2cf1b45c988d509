"""The process that looks into checkpoint places and tidies them for the server, which knows when that is allowed.

It is a process of its own since a store may be slow, hashing takes a core and the server must not wait. It is niced and
free of torch. It ends with whoever started it: at once when its standard input closes, also in the middle of a deletion
(the next sweep finishes that). So nothing is ever deleted while the server is away.

A question is a line of JSON, ``{"op", "place", ...}``. The answer is any number of lines ``{"deleted"}`` and then one
``{"done"}`` or ``{"error"}``.

    survey  {"place"}                     -> looks only
    sweep   {"place", "keep", "dry_run"}  -> what nobody needs goes; ``keep`` overrides the run's own number
    delete  {"place", "entries", "cause", "dry_run"} -> these checkpoints go

What is done is ``{"bytes", "rows", "pinned"}``: what is left, and how many checkpoints were in use.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from overnight.core.addresses import shown
from overnight.core.errors import BadInputError, OvernightError
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import open_place
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import Deletion, choose, mark, sweep

NICENESS = 10
Answer = Callable[[dict[str, Any]], None]


class Sweeper:
    """Answers questions about places. It remembers what it has seen of pins.

    Args:
        answer: Takes each line of an answer.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._watch = PinWatch()
        self._open = lru_cache(maxsize=1024)(open_place)

    def handle(self, question: Mapping[str, Any]) -> None:
        """Answers one question; whatever goes wrong is an answer too."""
        try:
            self._answer({"done": self._do(question)})
        except OvernightError as error:
            self._answer({"error": error.to_dict()})
        except Exception as error:  # each store's driver has errors of its own
            place = shown(str(question.get("place")))
            known = OvernightError(f"{place} cannot be tidied: {type(error).__name__}: {error}")
            self._answer({"error": known.to_dict()})

    def _do(self, question: Mapping[str, Any]) -> dict[str, Any]:
        found = survey(self._open(question["place"]), self._watch, question.get("keep"))
        match question["op"]:
            case "survey":
                doomed: list[Deletion] = []
            case "sweep":
                doomed = mark(found, at_rest=True)
            case "delete":
                doomed = choose(found, question["entries"], question["cause"])
            case other:
                raise BadInputError(f"there is no operation {other!r}")
        if question.get("dry_run"):
            for deletion in doomed:
                self._tell(deletion)
            doomed = []
        elif question["op"] != "survey":
            doomed = sweep(found, doomed, self._watch, self._tell)
        gone = {deletion.entry for deletion in doomed}
        num_bytes = found.num_bytes - sum(deletion.num_bytes for deletion in doomed)
        rows = [row.to_json() for row in found.rows if str(row.name) not in gone]
        return {"bytes": num_bytes, "rows": rows, "pinned": sum(bool(row.pinned_by) for row in found.rows)}

    def _tell(self, deletion: Deletion) -> None:
        self._answer({"deleted": deletion.to_json()})


def main() -> None:
    """Serves standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    os.nice(NICENESS)
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(questions,), daemon=True).start()
    sweeper = Sweeper(_print)
    while True:
        sweeper.handle(json.loads(questions.get()))


def _listen(questions: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)


def _print(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

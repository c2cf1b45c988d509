"""What a script trains with but does not track is named at the first save; what need not be tracked is not."""

import copy
import sys
import time
import weakref
from typing import Any

import torch
from torch import nn

from overnight.trainer import untracked


def names(tracked: dict[str, Any]) -> list[str]:
    """What is found in the caller's frame."""
    return sorted(untracked.untracked(tracked, [sys._getframe(1)]))


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def look(self, tracked: dict[str, Any]) -> list[str]:
        return names(tracked)


def test_everything_that_trains_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    ema = torch.optim.swa_utils.AveragedModel(net)
    assert names({}) == ["ema", "net", "optimizer", "scaler", "scheduler"]
    assert names({"net": net, "o": optimizer}) == ["ema", "scaler", "scheduler"]
    assert names({"net": net, "o": optimizer, "s": scheduler, "x": scaler, "e": ema}) == []


def test_what_is_part_of_something_tracked_is_not_named() -> None:
    backbone, head = nn.Linear(2, 2), nn.Linear(2, 1)
    both = nn.ModuleDict({"backbone": backbone, "head": head})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    first = torch.optim.lr_scheduler.LinearLR(optimizer)
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [2])
    assert names({"both": both, "o": optimizer, "s": chain}) == []
    assert names({"backbone": backbone, "head": head, "o": optimizer, "s": chain}) == [], "or of its parts"
    assert names({"backbone": backbone, "o": optimizer, "s": chain}) == ["both"], "and of parts only the whole"


def test_wrappers_count_as_what_is_inside() -> None:
    net = nn.Linear(2, 2)
    compiled = torch.compile(net, backend="eager")
    assert names({"net": net}) == [] and names({"net": compiled}) == []
    assert len(names({})) == 1


def test_a_frozen_teacher_is_not_named_but_what_changes_is() -> None:
    teacher = nn.Linear(2, 2).eval()
    net = nn.Linear(2, 2)
    average = copy.deepcopy(net).requires_grad_(False)
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert names({"net": net}) == ["average"]
    in_eval_while_saved = nn.Linear(2, 2).eval()
    in_eval_while_saved(torch.ones(1, 2)).sum().backward()
    assert names({"net": net}) == ["average", "in_eval_while_saved"]
    del teacher, loss, disabled, average


def test_inside_of_objects_lists_and_dicts() -> None:
    worker = Trainer()
    lists, dicts = [nn.Linear(1, 1)], {"a": (nn.Linear(1, 1))}
    assert names({}) == ["dicts['a']", "lists[0]", "worker.net", "worker.optimizer"]
    assert worker.look({}) == ["self.net", "self.optimizer"]
    assert worker.look({"net": worker.net}) == ["self.optimizer"]
    del lists, dicts


def test_an_object_with_a_state_of_its_own_covers_what_it_holds() -> None:
    class Algorithm(Trainer):
        def state_dict(self) -> Any:
            return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

        def load_state_dict(self, state: Any) -> None: ...

    algorithm = Algorithm()
    net = algorithm.net
    assert names({"algorithm": algorithm}) == []
    assert names({}) == ["algorithm.optimizer", "net"]
    assert net.training


def test_frames_further_out_are_looked_at_and_the_warning_says_it() -> None:
    net = nn.Linear(2, 2)

    def inner() -> str | None:
        return untracked.warning({})

    text = inner()
    assert text is not None and "net (Linear)" in text and "\n" not in text and "run.track" in text
    assert inner.__name__ == "inner" and net is not None


def test_looking_keeps_nothing_alive() -> None:
    class Batch:
        pass

    net = nn.Linear(2, 2)
    batch = Batch()
    gone = weakref.ref(batch)
    assert names({}) == ["net"]
    del batch
    assert gone() is None and net.training


def test_it_is_cheap() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    data = [list(range(100)) for _ in range(900)]
    best = min(_seconds(net) for _ in range(5))
    assert best < 0.05 and len(data) == 900


def _seconds(net: nn.Module) -> float:
    started = time.thread_time()
    untracked.warning({"net": net})
    return time.thread_time() - started

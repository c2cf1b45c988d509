"""What a rank tells of the checkpoint from which it goes on reaches the spool whole, or is refused."""

import asyncio
import json
from typing import Any

import pytest

from overnight.platform.node.rank_api import RankApi
from overnight.platform.node.wire import HttpError, Request


class Recorder:
    """The part of a supervisor that hears of forks."""

    generation = 3

    def __init__(self) -> None:
        self.spooled: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[int] = []

    def directive(self) -> dict[str, Any]:
        return {"version": 0, "action": "run"}

    def committed(self, step: int, *, forked: bool) -> None:
        assert forked
        self.steps.append(step)

    def spool(self, kind: str, data: dict[str, Any], *, urgent: bool = False) -> None:
        assert urgent
        self.spooled.append((kind, data))

    async def control(self, body: dict[str, Any]) -> dict[str, Any]:
        return body


def told(recorder: Recorder, body: dict[str, Any]) -> Any:
    request = Request("POST", "/v1/forked", {}, {}, json.dumps(body).encode())
    return asyncio.run(RankApi(recorder, None).answer(request))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "extra"),
    [
        ({"step": 7, "parent": [2, 1]}, {"parent": [2, 1]}),
        ({"step": 0, "parent": None}, {"parent": None}),
        ({"step": 7}, {}),
    ],
    ids=["a parent", "from scratch", "a trainer that tells no parent"],
)
def test_a_fork_is_spooled_with_its_parent(body: dict[str, Any], extra: dict[str, Any]) -> None:
    recorder = Recorder()
    assert told(recorder, body) == (200, {"directive": recorder.directive()})
    assert recorder.spooled == [
        ("generation", {"generation": 3, "fork_step": body["step"], "trainer": True, **extra}),
    ]
    assert recorder.steps == [body["step"]]


@pytest.mark.parametrize("parent", [[1], [0, 1], [1, True], [1, "1"], [1, 2**31], "1.1", {"attempt": 1}, 5, []])
def test_a_parent_that_is_none_is_refused_and_nothing_is_noted(parent: Any) -> None:
    recorder = Recorder()
    with pytest.raises(HttpError, match="parent"):
        told(recorder, {"step": 7, "parent": parent})
    assert (recorder.spooled, recorder.steps) == ([], [])

"""Logs in bounded memory and disk, and what is read out of them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from overnight.platform.node import evidence
from overnight.platform.node.objective import ObjectiveReader, as_value
from overnight.platform.node.output import BoundedOutput
from overnight.platform.node.tail import LINE_BYTES, LineSplitter, Tail, last_lines


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_splitting_does_not_depend_on_the_chunks(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    whole, parts = LineSplitter(), LineSplitter()
    expected = whole.feed(data) + whole.finish()
    found = [line for chunk in chunks for line in parts.feed(chunk)] + parts.finish()
    assert found == expected
    if b"\r" not in data:
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        assert expected == [line.decode("utf-8", "replace") for line in lines]


def test_progress_bars_collapse_and_long_lines_are_cut() -> None:
    splitter = LineSplitter()
    for number in range(1000):
        assert splitter.feed(b"\r%d/1000" % number) == []
    assert splitter.feed(b"\n") == ["999/1000"]
    for _ in range(100):
        assert splitter.feed(b"z" * 100_000) == []
        assert len(splitter._held) <= LINE_BYTES
    (line,) = splitter.feed(b"\nnext")
    assert line.endswith(f"[+{10_000_000 - LINE_BYTES} bytes]") and len(line) < LINE_BYTES + 40
    assert splitter.finish() == ["next"]


def test_a_tail_far_behind_jumps_and_one_on_a_cut_file_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    tail = Tail(log)
    assert tail.read() == []
    log.write_bytes(b"a\n" * 10_000_000)
    lines = tail.read() + tail.finish()
    assert tail.skipped_bytes > 0 and len(lines) < 5_000_000
    log.write_bytes(b"fresh\n")
    assert tail.read() == ["fresh"]


def test_output_keeps_head_and_tail_at_their_offsets(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    output = BoundedOutput(log, head_bytes=1 << 20, tail_bytes=4 << 20)
    assert output.bound() is False
    with log.open("ab", buffering=0) as file:
        for number in range(32):
            file.write(bytes([65 + number % 26]) * (1 << 20))
            output.bound()
    assert log.stat().st_size == 32 << 20
    assert log.stat().st_blocks * 512 <= 7 << 20
    data = log.read_bytes()
    assert data[: 1 << 20] == b"A" * (1 << 20) and data[-1:] == b"F" and b"\0" in data
    assert last_lines(log)[-1].startswith("F")


def test_the_last_exception_is_found_with_its_message() -> None:
    text = """step 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
second line"""
    error = evidence.error_from_log(text.splitlines())
    assert error is not None
    assert error["type"] == "torch.cuda.OutOfMemoryError"
    assert error["message"] == "CUDA out of memory. Tried to allocate 2 GiB\nsecond line"
    assert error["traceback"].startswith("Traceback") and "first" not in error["traceback"]
    assert evidence.is_out_of_memory(error)
    assert evidence.error_from_log(["all good", "Error: not python"]) is None
    assert not evidence.is_out_of_memory(evidence.make_error("RuntimeError", "shapes do not match"))
    host = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    assert evidence.is_out_of_memory(evidence.make_error("RuntimeError", host))


def test_objectives_are_counted_when_they_have_no_step() -> None:
    reader = ObjectiveReader({"metric": "acc", "source": "pattern", "pattern": r"acc=(\S+)"})
    assert reader.feed("epoch acc=0.5") == (1, {"acc": 0.5})
    assert reader.feed("nothing") is None
    assert reader.feed("acc=high") == (2, {"acc": "high"})
    lines = ObjectiveReader({"metric": "acc", "source": "json", "pattern": None})
    assert lines.feed('{"acc": 1, "epoch": 7}') == (7, {"acc": 1.0})
    assert lines.feed('{"acc": ' + "[" * 100_000) is None
    assert [as_value(value) for value in (10**400, float("-inf"), True, None)] == ["inf", "-inf", "True", "None"]

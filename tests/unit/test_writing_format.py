"""Files written without torch are what torch's own tools read: every dtype, value by value."""

import io
import pickle
import pickletools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.index import TensorEntry, index_from_bytes, index_to_bytes, merge
from overnight.trainer.checkpoint.manifest import SEGMENT_BYTES, FileEntry, Segment, check_file, describe
from overnight.trainer.checkpoint.writing import opcodes
from overnight.trainer.checkpoint.writing.archive import wrap
from overnight.trainer.checkpoint.writing.content import hash_piece
from overnight.trainer.checkpoint.writing.datafile import write_tensors
from overnight.trainer.checkpoint.writing.dcp import Metadata, metadata
from overnight.trainer.checkpoint.writing.order import LARGE_BYTES, PAGE_BYTES, Piece

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=30,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    data = (torch.arange(count) * 37 % (2 if dtype == torch.bool else 119)).to(torch.uint8)
    return data.view(dtype).reshape(shape)


def lay_out(tensors: dict[str, torch.Tensor]) -> tuple[list[Piece], memoryview]:
    pieces, memory = [], bytearray()
    for key, tensor in tensors.items():
        memory += bytes(-len(memory) % 64)
        data = raw(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(Piece(key, dtype, tuple(tensor.shape), len(memory), len(data)))
        memory += data
    return pieces, memoryview(memory)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[FileEntry, dict[str, TensorEntry]]:
    pieces, memory = lay_out(tensors)
    hashed = [hash_piece(piece, memory, lambda _: None) for piece in pieces]
    entry, chunks = write_tensors(folder / "__0_0.distcp", "__0_0.distcp", hashed, memory, lambda _: None)
    index = {p.key: TensorEntry(p.dtype, p.shape, (c,)) for p, c in zip(pieces, chunks, strict=True)}
    (folder / ".metadata").write_bytes(metadata(index))
    return entry, index


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape and raw(found) == raw(expected)


@pytest.fixture(scope="module")
def everything() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): some(dtype, 3, 5) for dtype in DTYPES}
    tensors |= {f"{dtype} scalar": some(dtype) for dtype in DTYPES}
    tensors |= {f"{dtype} empty": some(dtype, 0, 4) for dtype in DTYPES}
    tensors |= {"large": torch.randn(5 << 20), "größe/ключ": torch.ones(1), "$.a b\n": torch.zeros(2, 1, 1, 3, 1)}
    return tensors | {"just a block": torch.zeros(SEGMENT_BYTES, dtype=torch.uint8), "mib": torch.ones(1 << 18)}


def test_metadata_is_made_anew_if_a_tensor_lies_elsewhere(everything: dict[str, torch.Tensor], tmp_path: Path) -> None:
    _, index = write(tmp_path, everything)
    made = Metadata()
    assert made.of(index) == metadata(index) and made.of(dict(index)) is made.of(index)
    key, entry = next(iter(index.items()))
    chunk = entry.chunks[0]
    changes = [
        replace(entry, dtype="int8"),
        replace(entry, shape=(1, 2)),
        replace(entry, chunks=(chunk, chunk)),
        *(
            replace(entry, chunks=(replace(chunk, **change),))
            for change in ({"file": "x"}, {"at": (7,)}, {"shape": (7,)}, {"record": (7, 7)})
        ),
    ]
    for changed in changes:
        assert made.of({**index, key: changed}) == metadata({**index, key: changed}) != metadata(index)
    assert made.of({"other": entry}) == metadata({"other": entry})


def test_large_tensors_begin_at_a_page_of_the_file(everything: dict[str, torch.Tensor], tmp_path: Path) -> None:
    _, index = write(tmp_path, everything)
    large = [entry.chunks[0] for entry in index.values() if entry.chunks[0].num_bytes >= LARGE_BYTES]
    assert len(large) == 3 and all(chunk.offset % PAGE_BYTES == 0 for chunk in large)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for key, entry in index.items():
        start, length = entry.chunks[0].record
        assert_same(torch.load(io.BytesIO(data[start : start + length]), weights_only=True), everything[key])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 1, 300)], ids=str)
def test_an_archive_is_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, *shape)
    data = raw(tensor)
    wrapping = wrap(str(dtype).removeprefix("torch."), shape, len(data))
    assert len(wrapping.before) % 64 == 0
    loaded = torch.load(io.BytesIO(wrapping.before + data + wrapping.after), weights_only=True)
    assert_same(loaded, tensor)
    assert loaded.is_contiguous() and loaded.stride() == tensor.stride()


def test_an_archive_can_be_mapped(tmp_path: Path) -> None:
    tensor = torch.arange(100000.0)
    wrapping = wrap("float32", (100000,), 400000)
    (tmp_path / "it.pt").write_bytes(wrapping.before + raw(tensor) + wrapping.after)
    assert torch.equal(torch.load(tmp_path / "it.pt", mmap=True, weights_only=True), tensor)


def test_an_archive_beyond_four_gigabytes_has_the_long_numbers(tmp_path: Path) -> None:
    num_bytes = (4 << 30) + 64
    wrapping = wrap("uint8", (num_bytes,), num_bytes)
    with (tmp_path / "sparse.pt").open("wb") as file:
        file.write(wrapping.before)
        file.seek(num_bytes - 1, io.SEEK_CUR)
        file.write(b"\x07")
        file.write(wrapping.after)
    loaded = torch.load(tmp_path / "sparse.pt", mmap=True, weights_only=True)
    assert loaded.shape == (num_bytes,) and loaded[-1] == 7 and loaded[0] == 0


def test_stock_dcp_loads_everything(tmp_path: Path, everything: dict[str, torch.Tensor]) -> None:
    write(tmp_path, everything)
    found = {key: torch.empty_like(tensor) for key, tensor in everything.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    for key, tensor in everything.items():
        assert_same(found[key], tensor)


def test_stock_tools_convert_everything(tmp_path: Path, everything: dict[str, torch.Tensor]) -> None:
    write(tmp_path, everything)
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(found) == set(everything)
    for key, tensor in everything.items():
        assert_same(found[key], tensor)


def test_the_index_points_at_the_bytes(tmp_path: Path, everything: dict[str, torch.Tensor]) -> None:
    entry, index = write(tmp_path, everything)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert index_from_bytes(index_to_bytes(index)) == index
    for key, tensor in everything.items():
        chunk = index[key].chunks[0]
        assert chunk.offset % 64 == 0 and data[chunk.offset : chunk.offset + chunk.num_bytes] == raw(tensor)
        record = io.BytesIO(data[chunk.record[0] : sum(chunk.record)])
        assert_same(torch.load(record, weights_only=True), tensor)
    assert entry.size == len(data) and max(s.length for s in entry.segments) == SEGMENT_BYTES


def test_segments_cover_the_file_and_notice_every_region(tmp_path: Path, everything: dict[str, torch.Tensor]) -> None:
    entry, _ = write(tmp_path, everything)
    path = tmp_path / "__0_0.distcp"
    check_file(path, entry, "it")
    assert FileEntry.from_json(entry.to_json()) == entry
    data = bytearray(path.read_bytes())
    for segment in entry.segments:
        for position in {segment.offset, segment.offset + segment.length // 2, segment.offset + segment.length - 1}:
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([data[position] ^ 1]))
                file.flush()
                with pytest.raises(CorruptCheckpointError, match=f"at byte {segment.offset}"):
                    check_file(path, entry, "it")
                file.seek(position)
                file.write(data[position : position + 1])
    with path.open("r+b") as file:
        file.truncate(len(data) - 1)
    with pytest.raises(CorruptCheckpointError, match="bytes instead of"):
        check_file(path, entry, "it")


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    entry, _ = write(tmp_path, {})
    assert entry == describe(b"") and (tmp_path / "__0_0.distcp").stat().st_size == 0
    assert dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata == {}


def test_chunks_of_several_ranks_come_together(tmp_path: Path) -> None:
    pieces = [Piece("w", "float32", (2, 4), 0, 32, (4, 4), (2 * rank, 0)) for rank in range(2)]
    memory = memoryview(raw(torch.arange(8.0)))
    hashed = [hash_piece(piece, memory, lambda _: None) for piece in pieces]
    assert hashed[0].digest == hashed[1].digest

    def part(rank: int, folder: Path) -> dict[str, TensorEntry]:
        name = f"__{rank}_0.distcp"
        _, chunks = write_tensors(folder / name, name, [hashed[rank]], memory, lambda _: None)
        return {"w": TensorEntry("float32", (4, 4), tuple(chunks))}

    index = merge([part(1, tmp_path), part(0, tmp_path)])
    assert [chunk.at for chunk in index["w"].chunks] == [(0, 0), (2, 0)]
    (tmp_path / ".metadata").write_bytes(metadata(index))
    found = {"w": torch.empty(4, 4)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(found["w"], torch.arange(8.0).reshape(2, 4).repeat(2, 1))
    with pytest.raises(ValueError, match="stored twice"):
        merge([index, index])
    with pytest.raises(ValueError, match="is float32"):
        merge([index, {"w": TensorEntry("float64", (4, 4), ())}])


@given(VALUES)
def test_opcodes_say_what_pickle_would_say(value: object) -> None:
    def emit(value: object) -> bytes:
        match value:
            case None:
                return opcodes.NONE
            case bool():
                return opcodes.TRUE if value else opcodes.FALSE
            case int():
                return opcodes.integer(value)
            case str():
                return opcodes.text(value)
            case list():
                return opcodes.list_of(map(emit, value))
            case tuple():
                return opcodes.tuple_of(*map(emit, value))
            case dict():
                return opcodes.dict_of((emit(k), emit(v)) for k, v in value.items())
        raise AssertionError

    data = opcodes.BEGIN + emit(value) + opcodes.END
    pickletools.dis(data, io.StringIO())
    assert pickle.loads(data) == value


@given(st.binary(max_size=100))
def test_files_of_one_segment_have_the_plain_hash(data: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(data)
    assert describe(data) == FileEntry(len(data), digest, (Segment(0, len(data), digest),))


@pytest.mark.parametrize("rows", [[[0, 1, "00" * 16], [2, 1, "00" * 16]], [[1, 1, "00" * 16]], [[0, 1, "11" * 16]]])
def test_segments_with_gaps_are_refused(rows: list[list[object]]) -> None:
    with pytest.raises(ValueError):
        FileEntry.from_json({"size": 2, "xxh3_128": "00" * 16, "segments": rows})


def test_all_of_it_needs_no_torch() -> None:
    modules = "datafile dcp order content"
    code = "".join(f"import overnight.trainer.checkpoint.writing.{m}\n" for m in modules.split())
    code += "import sys; assert not {'torch', 'numpy', 'fsspec', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

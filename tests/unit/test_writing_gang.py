"""Several ranks write one checkpoint: what is equal once, what differs each for itself, chunks by their place."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from writing_lab import Memory, client_of, committed, finish, name_of, order

from overnight.core.errors import FencedError, SaveFailedError
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.index import INDEX, Chunk, TensorEntry, index_from_bytes, private_key
from overnight.trainer.checkpoint.manifest import FileEntry, describe, verify
from overnight.trainer.checkpoint.place import LocalPlace, Token
from overnight.trainer.checkpoint.writing.client import Ticket, WriterClient
from overnight.trainer.checkpoint.writing.content import Hashed
from overnight.trainer.checkpoint.writing.division import Held, Unit, divide
from overnight.trainer.checkpoint.writing.frozen import MIN_BYTES, Bases
from overnight.trainer.checkpoint.writing.order import Piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

digests = st.sampled_from("ab")
units = st.tuples(st.sampled_from("xyz"), st.sampled_from([None, (0,), (2,)]))


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


@contextlib.contextmanager
def gang(place: LocalPlace, tmp_path: Path, size: int, **options: object) -> Iterator[list[WriterClient]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(client_of(place, tmp_path / str(rank), rank=rank, world_size=size, **options))
            for rank in range(size)
        ]


def save(clients: list[WriterClient], memories: list[Memory], step: int = 1, **changes: object) -> list[Ticket]:
    pairs = list(zip(clients, memories, strict=True))
    tickets = [client.submit(order(step, step, memory, **changes), memory) for client, memory in pairs]
    return [finish(client, ticket) for client, ticket in zip(clients, tickets, strict=True)]


def load(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    found = {key: torch.empty(shape) for key, shape in shapes.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_equal_once_and_different_each(place: LocalPlace, tmp_path: Path, size: int) -> None:
    shared = {f"w{number}": torch.full((1000,), float(number)) for number in range(6)}
    memories = [Memory({**shared, "rng": torch.full((4,), float(rank))}) for rank in range(size)]
    with gang(place, tmp_path, size) as clients:
        tickets = save(clients, memories)
    assert [ticket.error for ticket in tickets] == [None] * size and all(ticket.committed for ticket in tickets)
    assert [ticket.published is not None for ticket in tickets] == [True] + [False] * (size - 1)
    folder = place.path(name_of(1))
    manifest = verify(folder)
    assert manifest.world_size == size
    names = {path.name for path in folder.iterdir()}
    assert names == set(manifest.files) | {"manifest.json"}, "what the ranks told each other is gone"
    index = index_from_bytes((folder / INDEX).read_bytes())
    assert set(index) == {*shared, *(private_key(rank, "rng") for rank in range(size))}
    owners = {index[key].chunks[0].file for key in shared}
    assert len(owners) == size, "every rank stores some"
    found = load(folder, {**{key: (1000,) for key in shared}, **{private_key(r, "rng"): (4,) for r in range(size)}})
    assert all(torch.equal(found[key], shared[key]) for key in shared)
    assert all(found[private_key(rank, "rng")].eq(rank).all() for rank in range(size))
    for rank in range(size):
        assert json.loads((folder / f"state-{rank}.json").read_text())["private"] == ["rng"]


def test_chunks_are_stored_once_wherever_they_are_held(place: LocalPlace, tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    memories, pieces = [], []
    for rank in range(4):  # two replicas of two shards each
        shard = whole[3 * (rank % 2) : 3 * (rank % 2) + 3]
        memory = Memory({"w": shard})
        memories.append(memory)
        piece = memory.pieces[0]
        pieces.append([Piece("w", "float32", (3, 4), piece.offset, piece.num_bytes, (6, 4), (3 * (rank % 2), 0))])
    with gang(place, tmp_path, 4) as clients:
        tickets = [c.submit(order(1, 1, m, pieces=p), m) for c, m, p in zip(clients, memories, pieces, strict=True)]
        assert all(finish(c, t).committed for c, t in zip(clients, tickets, strict=True))
        memories[3].bytes[0] ^= 1
        tickets = [c.submit(order(2, 2, m, pieces=p), m) for c, m, p in zip(clients, memories, pieces, strict=True)]
        errors = [finish(c, t).error for c, t in zip(clients, tickets, strict=True)]
    index = index_from_bytes((place.path(name_of(1)) / INDEX).read_bytes())
    assert [chunk.at for chunk in index["w"].chunks] == [(0, 0), (3, 0)] and index["w"].shape == (6, 4)
    assert torch.equal(load(place.path(name_of(1)), {"w": (6, 4)})["w"], whole)
    assert all("different values of the part of w at [3, 0]" in str(error) for error in errors)
    assert committed(place) == ["step-1.attempt-1.1"]


def test_a_rank_without_tensors_and_keys_of_one_rank(place: LocalPlace, tmp_path: Path) -> None:
    memories = [Memory({}), Memory({"only": torch.ones(3)})]
    with gang(place, tmp_path, 2) as clients:
        assert all(ticket.committed for ticket in save(clients, memories))
    assert set(index_from_bytes((place.path(name_of(1)) / INDEX).read_bytes())) == {"rank-1/only"}
    verify(place.path(name_of(1)))


def test_a_rank_that_fails_is_seen_by_all_and_the_next_save_works(place: LocalPlace, tmp_path: Path) -> None:
    memories = [Memory({"w": torch.ones(10)}) for _ in range(3)]
    with gang(place, tmp_path, 3) as clients:
        bad = Piece("w", "float32", (10,), 1 << 40, 40)
        tickets = []
        for rank, (client, memory) in enumerate(zip(clients, memories, strict=True)):
            pieces = [bad] if rank == 1 else memory.pieces
            tickets.append(client.submit(order(1, 1, memory, pieces=pieces), memory))
        errors = [finish(client, ticket).error for client, ticket in zip(clients, tickets, strict=True)]
        assert all(isinstance(error, SaveFailedError) for error in errors), errors
        assert "rank 1 gave up: w does not lie in" in str(errors[0]) and "rank 1" in str(errors[2])
        assert committed(place) == []
        assert all(ticket.committed for ticket in save(clients, memories, 2))
    assert committed(place) == ["step-2.attempt-1.1"]
    assert [entry for entry in place.entries() if "partial" in entry] == []


def test_a_rank_that_never_comes_costs_a_time_out(place: LocalPlace, tmp_path: Path) -> None:
    memories = [Memory({"w": torch.ones(10)}) for _ in range(2)]
    with gang(place, tmp_path, 2, timeout_seconds=1.0) as clients:
        ticket = finish(clients[0], clients[0].submit(order(1, 1, memories[0]), memories[0]))
        assert isinstance(ticket.error, SaveFailedError) and "waited 1 s for all ranks" in ticket.error.message
        late = finish(clients[1], clients[1].submit(order(1, 1, memories[1]), memories[1]))
        assert late.error is not None and "rank 0 gave up" in late.error.message
        assert all(ticket.committed for ticket in save(clients, memories, 2))


def test_a_fence_that_comes_while_ranks_write_stops_all(place: LocalPlace, tmp_path: Path) -> None:
    memories = [Memory({"w": torch.ones(10)}) for _ in range(2)]
    with gang(place, tmp_path, 2) as clients:
        assert all(ticket.committed for ticket in save(clients, memories))
        first = clients[1].submit(order(2, 2, memories[1]), memories[1])
        claim(place, Token(2), name_of(1))
        second = clients[0].submit(order(2, 2, memories[0]), memories[0])
        errors = [finish(clients[1], first).error, finish(clients[0], second).error]
    assert all(isinstance(error, FencedError) for error in errors), errors
    assert committed(place) == ["step-1.attempt-1.1"]


@given(st.lists(st.dictionaries(units, digests), min_size=1, max_size=4))
def test_divisions_store_everything_and_nothing_twice(rows: list[dict[Unit, str]]) -> None:
    holdings = [{unit: Held(digest, 8) for unit, digest in row.items()} for row in rows]
    try:
        shares = [divide(holdings, rank) for rank in range(len(rows))]
    except SaveFailedError:
        assert any(
            unit[1] is not None and len({row[unit] for row in rows if unit in row}) > 1 for row in rows for unit in row
        )
        return
    for rank, row in enumerate(rows):
        for unit in row:
            keepers = [number for number, share in enumerate(shares) if unit in share.shared]
            private = unit[1] is None and unit[0] in shares[rank].private
            assert (len(keepers) == 1) != private
            assert all(rows[number].get(unit) == row[unit] for number in keepers)
    for rank, share in enumerate(shares):
        assert share.shared <= set(rows[rank]) and share.private <= {key for key, at in rows[rank] if at is None}


def test_bytes_are_spread_evenly() -> None:
    holding: dict[Unit, Held] = {(f"w{number}", None): Held("d", (number + 1) * 1000) for number in range(40)}
    shares = [divide([holding] * 4, rank) for rank in range(4)]
    loads = [sum(holding[unit].num_bytes for unit in share.shared) for share in shares]
    assert max(loads) - min(loads) <= 40_000 and sum(loads) == sum(held.num_bytes for held in holding.values())


def piece_of(key: str, num_bytes: int, digest: str, frozen: bool = False) -> tuple[str, Hashed]:
    return key, Hashed(Piece(key, "uint8", (num_bytes,), 0, num_bytes, frozen=frozen), digest, ())


def test_only_what_is_large_and_proved_equal_goes_to_a_base() -> None:
    bases = Bases()
    large, small = piece_of("a", MIN_BYTES, "A"), piece_of("b", 10, "B")
    assert bases.sort([large, small]).moving == [large, small], "nothing is known of a first save"
    chunk = Chunk("__0_0.distcp", 64, MIN_BYTES, (0,), (MIN_BYTES,), (0, 1), "A")
    entry = FileEntry.of(describe(b"x").segments)
    bases.committed({"a": TensorEntry("uint8", (MIN_BYTES,), (chunk,))}, {"__0_0.distcp": entry})
    assert bases.sort([large, small]).steady == [large]
    assert bases.sort([piece_of("a", MIN_BYTES, "changed"), small]).steady == []
    assert bases.sort([large, piece_of("b", 40 * MIN_BYTES, "B")]).steady == [], "too small a share"
    assert bases.sort([piece_of("c", MIN_BYTES, "C", frozen=True)]).steady != []
    moved = Chunk("../base-1/x", 64, MIN_BYTES, (0,), (MIN_BYTES,), (0, 1), "A")
    bases.committed({"a": TensorEntry("uint8", (MIN_BYTES,), (moved,))}, {"../base-1/x": entry})
    assert [found for _, _, found in bases.sort([large, small]).known] == [moved]
    bases.drop("../base-1/x")
    assert bases.sort([large]).known == [] and bases.sort([large]).steady == [large]

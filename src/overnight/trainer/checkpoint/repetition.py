"""Takes apart the states of one save after the other, and anew only what is not as it was in the save before.

Training waits while a state is taken apart: some microseconds for each of its thousands of tensors. But from save to
save the same tensors lie at the same paths, in the same form. So names and JSON are kept, and a save compares what they
depend on: containers, keys and types; each tensor's shape, strides and type; which of them share memory; numbers and
strings by value, object by object. What is kept refers to no tensor, and keeps no memory.

What is compared later was read once: what is kept of a state is made from a copy of its containers, so that a thread
of the script that changes a number meanwhile spoils that save at most, and never those that come after it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from overnight.trainer.checkpoint.forms import Form
from overnight.trainer.checkpoint.state import (
    PLAIN,
    Encoded,
    Encoding,
    Json,
    Leaf,
    bytes_of_array,
    is_array,
    to_text,
)

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_SCALARS = PLAIN | {bytes}
_KEYS = frozenset((str, int, bool, type(None)))
_values_of = dict[Any, Any].values


class Encoder:
    """Takes states apart as :func:`~overnight.trainer.checkpoint.state.encode` does, faster the second time."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def encode(self, states: Mapping[str, Any]) -> Encoded:
        """Takes states apart without copying a tensor.

        Args:
            states: Live state by object name.

        Raises:
            SaveFailedError: Something in a state cannot be saved; the message names its path.
        """
        kept, self._kept = self._kept, None  # whatever happens now
        if kept is not None:
            flat = _flatten(states)
            if flat is not None and kept.fits(flat):
                jsons = kept.jsons_of(flat)
                if jsons is not None:
                    self._kept = kept
                    return _Repeated(kept, flat, jsons)
        with suppress(RuntimeError):  # it contains itself, or a thread changes its keys: said below
            states = _copied(dict(states))
        walk = Encoding()
        objects = walk.encode_all(states)
        flat = _flatten(states)
        if flat is not None and len(walk.seen) == len(flat.tensors):  # quantized ones are no leaves
            with suppress(RuntimeError):
                self._kept = _Kept(flat, walk, objects)
        return Encoded(objects, walk.leaves, self._kept)


def _copied(value: Any) -> Any:
    """The same tensors and values in containers of their own."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([_copied(item) for item in value])
    if kind is OrderedDict:
        result = OrderedDict((key, _copied(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            result._metadata = _copied(value._metadata)  # type: ignore[attr-defined]
        return result
    return value


# -- what there is ----------------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """A part of the states whose JSON is kept: an object, or what a key of it leads to.

    Attributes:
        name: Of the object.
        key: None for a whole object.
        value: The live state.
        plain: All that is no container, key or tensor in it, in order.
        start: How many tensors lie before its own.
        skeleton: Its own part of it.
    """

    name: str
    key: str | None
    value: Any
    plain: list[Any]
    start: int
    skeleton: slice


class _OddError(Exception):
    """Something that is to be looked at anew each time."""


class _Flat:
    """States in a row.

    Attributes:
        names: Of the objects.
        skeleton: Containers with their keys and the types of what is in them, in order.
        units: The parts.
        tensors: All tensors, and arrays as tensors of bytes; in the order in which they are encoded.
        addresses: Where each begins, 0 of empty ones.
        memories: The same; of empty ones something that tells their memory from others.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.skeleton: list[Any] = []
        self.units: list[_Unit] = []
        self.tensors: list[torch.Tensor] = []
        self.addresses = self.memories = np.empty(0, np.uint64)

    def locate(self) -> None:
        """Looks where all tensors are.

        Raises:
            _OddError: One has given its memory away and kept its shape.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self.addresses = self.memories = np.array(addresses, dtype=np.uint64)
        if 0 in addresses:
            empty = [index for index, address in enumerate(addresses) if not address]
            if any(self.tensors[index].numel() for index in empty):
                raise _OddError
            self.memories = self.addresses.copy()
            self.memories[empty] = [self.tensors[index].untyped_storage()._cdata for index in empty]

    def add_unit(self, name: str, key: str | None, value: Any) -> None:
        plain: list[Any] = []
        start, begin = len(self.tensors), len(self.skeleton)
        self.skeleton.append((name, key, type(value)))
        self._add((value,), (type(value),), plain)
        self.units.append(_Unit(name, key, value, plain, start, slice(begin, len(self.skeleton))))

    def _add(self, values: Any, kinds: Sequence[type], plain: list[Any]) -> None:
        distinct = set(kinds)
        if distinct <= _TENSORS:
            self.tensors.extend(values)
        elif distinct <= _SCALARS:
            plain.extend(values)
        elif not (distinct == {dict} and self._add_rows(values)):
            for kind, value in zip(kinds, values, strict=True):
                self._add_one(kind, value, plain)

    def _add_rows(self, rows: Collection[dict[Any, Any]]) -> bool:
        """Adds dicts of tensors, as the states of an optimizer are, all at once; False if they are something else."""
        keys = list(chain.from_iterable(rows))
        values = list(chain.from_iterable(map(_values_of, rows)))
        if set(map(type, keys)) != {str} or not set(map(type, values)) <= _TENSORS:
            return False
        self.skeleton += list(map(len, rows)), keys
        self.tensors += values
        return True

    def _add_one(self, kind: type, value: Any, plain: list[Any]) -> None:
        if kind is dict or kind is OrderedDict:
            keys, kinds = list(value), list(map(type, value.values()))
            self.skeleton += keys, kinds
            if set(map(type, keys)) != {str}:
                self._add_keys(keys)
            self._add(value.values(), kinds, plain)
            if kind is OrderedDict:
                self._add_notes(getattr(value, "_metadata", None), plain)
        elif kind in _TENSORS:
            self.tensors.append(value)
        elif kind in _SCALARS:
            plain.append(value)
        elif kind is list or kind is tuple:
            kinds = list(map(type, value))
            self.skeleton.append(kinds)
            self._add(value, kinds, plain)
        elif is_array(value):
            self.skeleton.append((value.dtype, np.shape(value)))
            self.tensors.append(bytes_of_array(value))
        else:
            raise _OddError

    def _add_notes(self, notes: Any, plain: list[Any]) -> None:
        """Adds what torch notes about a module's submodules: a dict for each, with its version."""
        if notes is None:
            plain.append(None)
            return
        if type(notes) is not OrderedDict or set(map(type, notes.values())) != {dict} or hasattr(notes, "_metadata"):
            raise _OddError
        keys = [*notes, *chain.from_iterable(notes.values())]
        values = list(chain.from_iterable(map(_values_of, notes.values())))
        if set(map(type, keys)) != {str} or not set(map(type, values)) <= _SCALARS:
            raise _OddError
        self.skeleton += keys, list(map(len, notes.values()))
        plain.extend(values)

    def _add_keys(self, keys: list[Any]) -> None:
        kinds = list(map(type, keys))
        if not set(kinds) <= _KEYS:
            raise _OddError
        self.skeleton.append(kinds)  # True is 1 when compared, but not in JSON


def _flatten(states: Mapping[str, Any]) -> _Flat | None:
    """The states in a row; None if there is something in them that has to be looked at anew each time."""
    flat = _Flat(tuple(states))
    try:
        for name, state in states.items():
            if type(state) is dict and all([type(key) is str and key[:1] != "$" for key in state]):
                flat.skeleton.append((name, tuple(state)))
                for key, value in state.items():
                    flat.add_unit(name, key, value)
            else:
                flat.add_unit(name, None, state)
        flat.locate()
    except (_OddError, RuntimeError):
        return None
    return flat


class _Sharing:
    """Which tensors begin at the same address.

    Args:
        addresses: Of each.
    """

    def __init__(self, addresses: NDArray[np.uint64]) -> None:
        self._addresses = addresses.tolist()
        self._owners = {address: index for index, address in enumerate(self._addresses)}

    def holds(self, addresses: NDArray[np.uint64], moved: Sequence[int]) -> bool:
        """Whether the same ones do now, and takes in where they are.

        Args:
            addresses: Of each.
            moved: Indices of those that are not where they were.
        """
        if len(self._owners) == len(self._addresses):  # no two of them
            now = {int(addresses[index]): index for index in moved}
            for index in moved:
                del self._owners[self._addresses[index]]
            is_same = len(now) == len(moved) and self._owners.keys().isdisjoint(now)
            self._owners.update(now)
            for address, index in now.items():
                self._addresses[index] = address
            return is_same
        other = addresses.tolist()
        is_same = _firsts(other) == _firsts(self._addresses)
        self._addresses = other
        return is_same


def _firsts(addresses: Sequence[int]) -> list[int]:
    """For each the first one that begins there."""
    first: dict[int, int] = {}
    return [first.setdefault(address, index) for index, address in enumerate(addresses)]


# -- what is kept -----------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """A leaf without its tensor."""

    key: str
    on: str


class _Kept:
    """All that a save needs not find out again.

    Args:
        flat: The states.
        walk: What took them apart.
        objects: What came out.

    Attributes:
        slots: The leaves, without their tensors.
        firsts: For each leaf the index of its tensor.
    """

    def __init__(self, flat: _Flat, walk: Encoding, objects: dict[str, Json]) -> None:
        self.slots = [_Slot(leaf.key, leaf.on) for leaf in walk.leaves.values()]
        self.firsts = walk.firsts
        self._seen = walk.seen
        self._skeleton = flat.skeleton
        self._form = Form(flat.tensors)
        self._memories = flat.memories
        self._sharing = _Sharing(flat.memories)
        self._parts: list[tuple[list[Any], Json]] = [
            (unit.plain, objects[unit.name] if unit.key is None else objects[unit.name][unit.key])
            for unit in flat.units
        ]
        self._texts: list[tuple[Json, str] | None] = [None] * len(flat.units)

    def fits(self, flat: _Flat) -> bool:
        """Whether only content and addresses differ."""
        if self._skeleton != flat.skeleton or not self._form.is_of(flat.tensors):
            return False
        elsewhere = np.flatnonzero(self._memories != flat.memories).tolist()
        self._memories = flat.memories
        return not elsewhere or self._sharing.holds(flat.memories, elsewhere)

    def jsons_of(self, flat: _Flat) -> list[Json] | None:
        """JSON of each part: the one that is kept if all its numbers and strings are the same.

        Returns:
            None if a state has changed since it was laid out flat.
        """
        jsons = []
        for index, unit in enumerate(flat.units):
            plain, json = self._parts[index]
            if not _are_same(plain, unit.plain):
                part = self._anew(unit)
                if part is None:
                    return None
                self._parts[index] = part
                json = part[1]
            jsons.append(json)
        return jsons

    def _anew(self, unit: _Unit) -> tuple[list[Any], Json] | None:
        """Numbers and strings of a part, and its JSON with them; None if it has another form by now."""
        again = _Flat(())
        try:
            value = _copied(unit.value)
            again.add_unit(unit.name, unit.key, value)
        except (_OddError, RuntimeError):
            return None
        if again.skeleton != self._skeleton[unit.skeleton]:
            return None
        return again.units[0].plain, _Again(self._seen[unit.start :]).encode(value, "")

    def text_of(self, index: int, json: Json) -> str:
        """Text of a part's JSON; several threads may ask."""
        known = self._texts[index]
        if known is None or known[0] is not json:
            self._texts[index] = known = (json, to_text(json))
        return known[1]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether values have the same JSON; equal ones need not: 1 is True, and 0.0 is -0.0."""
    if len(one) == len(other) and all(map(is_, one, other)):
        return True
    if one != other or list(map(type, one)) != list(map(type, other)):
        return False
    return repr(_floats(one)) == repr(_floats(other))


def _floats(values: list[Any]) -> list[float]:
    return [value for value in values if type(value) is float]


class _Again(Encoding):
    """A walk in which the JSON of all tensors is known.

    Args:
        seen: Of each, in order.
    """

    def __init__(self, seen: Sequence[Json]) -> None:
        super().__init__()
        self._known: Iterator[Json] = iter(seen)

    def _usual(self, tensor: torch.Tensor, path: str) -> Json:
        return next(self._known)

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        return next(self._known)

    def _array(self, value: Any, path: str) -> Json:
        return next(self._known)


class _Repeated(Encoded):
    """States that differ from those of the save before in content only.

    Args:
        kept: Of that save.
        flat: The states of this one.
        jsons: Of its parts.
    """

    def __init__(self, kept: _Kept, flat: _Flat, jsons: Sequence[Json]) -> None:
        super().__init__({}, {}, kept)
        self._kept = kept
        self._names = flat.names
        self._parts = [(unit.name, unit.key, json) for unit, json in zip(flat.units, jsons, strict=True)]
        if len(kept.firsts) == len(flat.tensors):
            self._tensors, self._addresses = flat.tensors, flat.addresses
        else:
            self._tensors = [flat.tensors[index] for index in kept.firsts]
            self._addresses = flat.addresses[kept.firsts]

    @cached_property
    def objects(self) -> dict[str, Json]:
        """JSON by object name."""
        objects: dict[str, Json] = {name: {} for name in self._names}
        for name, key, json in self._parts:
            if key is None:
                objects[name] = json
            else:
                objects[name][key] = json
        return objects

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Live tensors by key."""
        slots = zip(self._kept.slots, self._tensors, strict=True)
        return {slot.key: Leaf(slot.key, tensor.detach(), slot.on) for slot, tensor in slots}

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The live tensors of all leaves."""
        return self._tensors

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where each of them begins."""
        return self._addresses

    def text(self) -> str:
        """The objects as JSON text."""
        whole: dict[str, str] = {}
        members: dict[str, list[str]] = {name: [] for name in self._names}
        for index, (name, key, json) in enumerate(self._parts):
            text = self._kept.text_of(index, json)
            if key is None:
                whole[name] = text
            else:
                members[name].append(f"{to_text(key)}:{text}")
        return _joined(f"{to_text(name)}:{whole.get(name) or _joined(members[name])}" for name in self._names)


def _joined(members: Iterable[str]) -> str:
    return f"{{{','.join(members)}}}"

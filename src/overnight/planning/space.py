"""A search space as planners see it: typed params in an order in which every condition can be answered.

Grids are exact: a finite param is addressed by the index of its value, and the values are computed in decimal
arithmetic, so that ``[0, 0.3] step 0.1`` holds ``0.3`` and not ``0.30000000000000004``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, cast

from overnight.core.canonical import canonical, canonical_json
from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Distribution, SweepConfig
from overnight.planning import conditions

Internal = int | float
"""A value as samplers handle it: the index of a finite param, the number itself of a continuous one."""

_MAX_EXACT = 2**53


@dataclass(frozen=True)
class Param:
    """One dimension.

    Attributes:
        name: Dotted name.
        size: Number of values, or None when continuous.
        low, high: Bounds of a continuous param.
        log: Whether a continuous param is log-uniform.
        ordered: Whether neighbouring indices are neighbouring values (a grid), or mean nothing (a choice).
        condition: When it exists; None is always.
    """

    name: str
    size: int | None
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    ordered: bool = True
    condition: conditions.Condition | None = None
    choices: tuple[Any, ...] = ()
    origin: Decimal = Decimal(0)
    step: Decimal = Decimal(1)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {canonical_json(choice): index for index, choice in enumerate(self.choices)}

    def decode(self, internal: Internal) -> Any:
        """The canonical value of an index or number."""
        if self.size is None:
            return canonical(min(max(float(internal), self.low), self.high))
        if self.choices:
            return self.choices[int(internal)]
        value = self.origin + int(internal) * self.step
        return int(value) if value == value.to_integral_value() else float(value)

    def encode(self, value: Any) -> Internal | None:
        """The index or number of a canonical value; None if the value is not in this param's range."""
        if self.choices:
            return self._index.get(canonical_json(value))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if self.size is None:
            return float(value) if self.low <= value <= self.high else None
        index = round((Decimal(str(value)) - self.origin) / self.step)
        return index if 0 <= index < self.size and self.decode(index) == value else None

    def at(self, unit: float) -> Internal:
        """The index or number at ``unit`` in [0, 1): uniform over values, log-uniform where asked."""
        if self.size is not None:
            return min(int(unit * self.size), self.size - 1)
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return min(max(math.exp(low + unit * (high - low)), self.low), self.high)
        return self.low * (1 - unit) + self.high * unit


@dataclass(frozen=True)
class Space:
    """The params in dependency order, and what every configuration gets as it is."""

    params: tuple[Param, ...]
    fixed: Mapping[str, Any]

    @property
    def size(self) -> int | None:
        """An upper bound of the number of configurations; None when a param is continuous."""
        sizes = [param.size for param in self.params]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def draw(self, choose: Callable[[Param], Internal]) -> dict[str, Internal]:
        """One configuration: ``choose`` is asked for each param that exists, in dependency order."""
        internal: dict[str, Internal] = {}
        values = flatten(self.fixed)
        for param in self.params:
            if param.condition is None or param.condition.holds(values):
                internal[param.name] = choose(param)
                values[param.name] = param.decode(internal[param.name])
        return internal

    def build(self, internal: Mapping[str, Internal]) -> dict[str, Any]:
        """The trial's canonical params: dots nest, fixed params are merged in."""
        result = _canonical(self.fixed)
        for param in self.params:
            if param.name in internal:
                _put(result, param.name, param.decode(internal[param.name]))
        return _canonical(result)

    def read(self, params: Mapping[str, Any]) -> dict[str, Internal] | None:
        """The opposite of :meth:`build`; None if these params are not a point of this space."""
        internal: dict[str, Internal] = {}
        values = flatten(self.fixed)
        for param in self.params:
            found, value = _get(params, param.name)
            active = param.condition is None or param.condition.holds(values)
            if found != active:
                return None
            if active:
                code = param.encode(value)
                if code is None:
                    return None
                internal[param.name] = code
                values[param.name] = value
        return internal

    def configurations(self) -> Iterator[dict[str, Internal]]:
        """Every configuration of a finite space once, in a fixed order, lazily."""
        yield from self._branch(0, {}, flatten(self.fixed))

    def _branch(self, at: int, chosen: dict[str, Internal], values: dict[str, Any]) -> Iterator[dict[str, Internal]]:
        if at == len(self.params):
            yield dict(chosen)
            return
        param = self.params[at]
        if param.condition is not None and not param.condition.holds(values):
            yield from self._branch(at + 1, chosen, values)
            return
        assert param.size is not None, "only finite spaces can be listed"
        for index in range(param.size):
            name = param.name
            yield from self._branch(at + 1, {**chosen, name: index}, {**values, name: param.decode(index)})


def parse(config: SweepConfig) -> Space:
    """The space of a sweep.

    Raises:
        InvalidSpecError: A bound that is not exact, a step on a log scale, a condition that does not parse, reads an
            unknown param or goes in a circle, two params of which one lies inside the other.
    """
    fixed = _canonical(config.fixed)
    params = {name: _param(name, distribution) for name, distribution in config.space.items()}
    _check_names(params, fixed)
    return Space(tuple(_ordered(params, frozenset(flatten(fixed)))), fixed)


def _canonical(params: Mapping[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], canonical(dict(params)))


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every mapping and leaf by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat[prefix + key] = value
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
    return flat


def _param(name: str, distribution: Distribution) -> Param:
    if not name or any(not part for part in name.split(".")):
        raise InvalidSpecError(f"{name!r} is no param name", hint="Dots nest: write opt.lr, without empty parts.")
    condition = conditions.parse(distribution.when) if distribution.when is not None else None
    if distribution.kind == "choice":
        unique = {canonical_json(value): canonical(value, name) for value in distribution.choices}
        return Param(name, len(unique), ordered=False, condition=condition, choices=tuple(unique.values()))
    assert distribution.low is not None and distribution.high is not None, "the wire model checks it"
    low, high = distribution.low, distribution.high
    if distribution.kind == "int":
        return _whole(name, low, high, distribution.step, condition)
    if distribution.kind == "log" and distribution.step is not None:
        raise InvalidSpecError(f"{name}: a log scale has no step", hint="Use choices, or a range with a step.")
    if low == high:
        return Param(name, 1, condition=condition, choices=(canonical(low),))
    if distribution.step is not None:
        return _grid(name, low, high, distribution.step, condition)
    return Param(name, None, low=low, high=high, log=distribution.kind == "log", condition=condition)


def _whole(name: str, low: float, high: float, step: float | None, condition: conditions.Condition | None) -> Param:
    step = 1.0 if step is None else step
    for what, value in (("low", low), ("high", high), ("step", step)):
        if not float(value).is_integer() or abs(value) > _MAX_EXACT:
            raise InvalidSpecError(f"{name}: {what} of an int is a whole number up to 2**53, not {value}")
    return _grid(name, low, high, step, condition)


def _grid(name: str, low: float, high: float, step: float, condition: conditions.Condition | None) -> Param:
    origin, end, width = (Decimal(str(value)) for value in (low, high, step))
    size = int((end - origin) // width) + 1
    if size > _MAX_EXACT:
        raise InvalidSpecError(f"{name}: a grid of {size} values is too fine", hint="Leave the step out.")
    return Param(name, size, condition=condition, origin=origin, step=width)


def _check_names(params: Mapping[str, Param], fixed: Mapping[str, Any]) -> None:
    taken = flatten(fixed)
    for name, param in params.items():
        if name in taken:
            raise InvalidSpecError(f"{name} is both searched and fixed", hint="Remove one of the two.")
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent in params or (parent in taken and not isinstance(taken[parent], dict)):
                raise InvalidSpecError(f"{name} lies inside {parent}, which has a value of its own")
        for other in param.condition.names() if param.condition else ():
            if other not in params and other not in taken:
                raise InvalidSpecError(
                    f"the condition of {name} reads {other}, which is no param of this sweep",
                    hint=f"Params are: {', '.join(sorted({*params, *taken}))[:500]}.",
                )


def _ordered(params: Mapping[str, Param], known: frozenset[str]) -> Iterator[Param]:
    pending = dict(params)
    while pending:
        ready = [p for p in pending.values() if p.condition is None or not p.condition.names() & pending.keys() - known]
        if not ready:
            raise InvalidSpecError(f"the conditions of {', '.join(sorted(pending))[:500]} go in a circle")
        for param in ready:
            del pending[param.name]
        yield from ready


def _put(target: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    for parent in parents:
        target[parent] = dict(target.get(parent, {}))
        target = target[parent]
    target[leaf] = value


def _get(params: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    current: Any = params
    for part in name.split("."):
        if not isinstance(current, Mapping) or part not in current:
            return False, None
        current = current[part]
    return True, current

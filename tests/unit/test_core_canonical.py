"""One canonical form: equal configurations have equal text, everything else is an error that names the place."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.canonical import canonical, canonical_json, digest, loads_strict
from overnight.core.errors import InvalidParamsError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=4), max_leaves=20)


def normal_keys_differ(value: object) -> bool:
    import unicodedata

    if isinstance(value, dict):
        names = [unicodedata.normalize("NFC", k) for k in value]
        return len(set(names)) == len(names) and all(normal_keys_differ(v) for v in value.values())
    return all(normal_keys_differ(v) for v in value) if isinstance(value, list) else True


@given(values.filter(normal_keys_differ))
def test_canonical_text_is_a_fixed_point_and_round_trips(value: object) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert canonical(json.loads(text)) == canonical(value)


@given(st.dictionaries(keys, scalars, min_size=2, max_size=6).filter(normal_keys_differ), st.randoms())
def test_order_of_keys_does_not_matter(value: dict[str, object], random: object) -> None:
    items = list(value.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert digest(dict(items)) == digest(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 1.0}, {"lr": 1}),
        ({"x": -0.0}, {"x": 0}),
        ({"e\u0301": 1}, {"\u00e9": 1}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_the_same_configuration_has_the_same_hash(one: object, other: object) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"), [({"a": True}, {"a": 1}), ({"a": "1"}, {"a": 1}), ({"a": None}, {}), ({"a": 0.1}, {"a": 0.2})]
)
def test_different_configurations_have_different_hashes(one: object, other: object) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lr": math.nan}, "params.lr is nan"),
        ({"a": [1, math.inf]}, r"params.a\[1\] is inf"),
        ({"n": 2**63}, "beyond 64 bits"),
        ({1: 2}, "no string"),
        ({"\u00e9": 1, "e\u0301": 2}, "twice"),
        ({"s": {1, 2}}, "set"),
        ({"s": b"x"}, "bytes"),
        ({"s": "\ud800"}, "valid Unicode"),
    ],
)
def test_what_has_no_canonical_form_is_named(value: object, words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        canonical_json(value)


def test_bounds_hold_for_depth_and_size() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidParamsError, match="nested deeper"):
        canonical_json(deep)
    with pytest.raises(InvalidParamsError, match="larger than"):
        canonical_json({"x": "y" * 300_000})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": NaN}', "NaN"),
        ("{", "not JSON"),
        ("lr=3", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_strict_json_refuses_what_json_loads_lets_pass(text: str, words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        loads_strict(text)

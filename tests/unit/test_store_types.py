"""The column types: what goes in comes out, on every database."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from overnight.store.models import JsonText, UtcDateTime, storable

DIALECTS: list[sa.Dialect] = [sa.make_url(url).get_dialect()() for url in ("sqlite://", "postgresql+psycopg://")]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_json_comes_back_and_fits_any_database(value: Any) -> None:
    for dialect in DIALECTS:
        text = JsonText().process_bind_param(value, dialect)
        assert JsonText().process_result_value(text, dialect) == value
        if text is not None:
            assert "\x00" not in text
            text.encode()


def test_json_text_is_one_text() -> None:
    left, right = {"b": 1, "a": "é"}, {"a": "é", "b": 1}
    bind = JsonText().process_bind_param
    assert bind(left, DIALECTS[0]) == bind(right, DIALECTS[1]) == '{"a":"é","b":1}'


def test_a_lone_surrogate_survives() -> None:
    text = JsonText().process_bind_param("\ud800", DIALECTS[0])
    assert text == '"\\ud800"'
    assert JsonText().process_result_value(text, DIALECTS[0]) == "\ud800"


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        JsonText().process_bind_param({"a": float("nan")}, DIALECTS[0])


def test_times_are_utc() -> None:
    zurich = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    stored = UtcDateTime().process_bind_param(zurich, DIALECTS[0])
    assert stored == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert UtcDateTime().process_result_value(datetime(2026, 7, 1, 10), DIALECTS[0]) == zurich
    with pytest.raises(ValueError, match="no time zone"):
        UtcDateTime().process_bind_param(datetime(2026, 7, 1), DIALECTS[0])


@given(st.text(), st.integers(1, 50))
def test_storable_text(text: str, limit: int) -> None:
    found = storable(text, limit)
    assert len(found) <= limit
    assert "\x00" not in found
    found.encode()
    assert storable(found, limit) == found

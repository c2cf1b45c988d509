"""Amounts of bytes, and the places where people write them: settings and spec files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.errors import InvalidSpecError
from overnight.core.settings import build_settings
from overnight.core.sizes import parse_bytes, show_bytes
from overnight.core.specfile import parse

SPEC = "experiment: a\nrun: python train.py\n"


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4096", 4096), ("1k", 1000), ("1 KiB", 1024), ("50GB", 50 * 10**9), ("1.5TiB", 3 * 2**39),
        ("200 m", 2 * 10**8), ("7B", 7), ("0.001kB", 1), ("2PB", 2 * 10**15),
    ],
)  # fmt: skip
def test_amounts(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1e9", "0", "0.1B", "1 G B", "nan", "1,5GB", "50GBs", "1i"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of bytes"):
        parse_bytes(text)


@given(st.integers(1, 10**15))
def test_what_is_shown_is_about_what_it_is(amount: int) -> None:
    assert parse_bytes(show_bytes(amount)) == pytest.approx(amount, rel=0.006)


def test_a_quota_in_a_spec() -> None:
    assert parse(SPEC + "checkpoints: {quota: 50GB}\n").config(workdir="/w").checkpoint_quota_bytes == 50 * 10**9
    assert parse(SPEC + "checkpoints: {quota: 1000}\n").config(workdir="/w").checkpoint_quota_bytes == 1000
    assert parse(SPEC).config(workdir="/w").checkpoint_quota_bytes is None


@pytest.mark.parametrize("quota", ["much", "0", "-5", "[1]", "1.5", "true"])
def test_a_quota_that_is_none_is_named(quota: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.yaml:3"):
        parse(SPEC + f"checkpoints: {{quota: {quota}}}\n")


def test_a_quota_makes_no_other_trial() -> None:
    one, other = (parse(SPEC + extra).config(workdir="/w") for extra in ("", "checkpoints: {quota: 1GB}\n"))
    assert one.identity == other.identity


def test_a_quota_for_all_experiments() -> None:
    env = {"OVERNIGHT_HOME": "/h", "OVERNIGHT_CHECKPOINT_QUOTA": "2GB"}
    assert build_settings(env).checkpoint_quota_bytes == 2 * 10**9
    assert build_settings({"OVERNIGHT_HOME": "/h"}).checkpoint_quota_bytes is None
    with pytest.raises(InvalidSpecError, match="checkpoint_quota"):
        build_settings(env | {"OVERNIGHT_CHECKPOINT_QUOTA": "lots"})

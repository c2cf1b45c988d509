"""Words behind a script: which are params, what they are worth, and what is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.cli import flags
from overnight.core.enums import ArgsStyle
from overnight.core.errors import InvalidParamsError
from overnight.trainer.params import resolve


def parse(*words, style=ArgsStyle.FLAGS, reserved=()):
    return flags.parse_words(words, style, reserved)


def test_flags_become_params():
    words = parse(
        "in.txt", "--lr", "3e-4", "--n=2", "--name", "abc", "--fast", "--shift", "-3", "--on", "true", "--l=[1,2]"
    )
    assert words.argv == ("in.txt",)
    assert words.params == {"lr": 3e-4, "n": 2, "name": "abc", "fast": True, "shift": -3, "on": True, "l": [1, 2]}


def test_a_double_dash_ends_params():
    words = parse("--lr", "1", "--", "--verbose", "x", "--lr", "2")
    assert words == flags.Words(("--verbose", "x", "--lr", "2"), {"lr": 1})


def test_a_flag_with_dashes_reaches_the_trainers_param():
    given = parse("--weight-decay", "0.5", "--opt.max-lr", "2").params
    assert resolve({"weight_decay": 0.1, "opt": {"max_lr": 1.0}}, given) == {
        "weight_decay": 0.5,
        "opt": {"max_lr": 2.0},
    }
    assert resolve({"weight-decay": 0.1, "weight_decay": 0.2}, given | {"opt.max-lr": 1})["weight-decay"] == 0.5


def test_hydra_words():
    assert parse("opt.lr=3e-4", "model=small", style=ArgsStyle.HYDRA).params == {"opt.lr": 3e-4, "model": "small"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lr", "1", "--lr", "2"), "given twice"),
        (("--lr", "NaN"), "lr: NaN"),
        (("--lr", "-Infinity"), "lr: -Infinity"),
        (("--lr", "1e999"), "not a finite number"),
        (("--n", "99999999999999999999"), "beyond 64 bits"),
        (("--o", '{"a":1,"a":2}'), "comes twice"),
        (("--layers", "1", "2", "3"), "'2' behind --layers belongs to nothing"),
        (("-v",), "'-v' is no param"),
        (("--=3",), "names no param"),
        (("--gpus", "2"), "--gpus stands behind the script"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(InvalidParamsError) as caught:
        parse(*words, reserved=("--gpus",))
    assert message in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "007", "1.2.3", "nullable", "[x", "{y", '"open', "-", "1e", "True", "a,b", "\x1b[31m"]
)
def test_what_is_no_json_stays_text(text):
    assert flags.parse_value(text) == text


@given(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
def test_json_scalars_keep_their_value(value):
    found = flags.parse_value(json.dumps(value))
    assert found == value
    assert not isinstance(found, str)


@given(st.text())
def test_any_text_is_a_value_or_refused(text):
    try:
        value = flags.parse_value(text)
    except InvalidParamsError:
        return
    json.dumps(value, allow_nan=False)
    assert not (isinstance(value, float) and math.isnan(value))


def test_pairs_and_objects():
    assert flags.parse_pairs(["a=1", "b==", "c="]) == {"a": 1, "b": "=", "c": ""}
    for bad in ("a", "=1"):
        with pytest.raises(InvalidParamsError, match="name=value"):
            flags.parse_pairs([bad])
    with pytest.raises(InvalidParamsError, match="twice"):
        flags.parse_pairs(["a=1", "a=2"])
    assert flags.parse_object('{"lr": 1.0}') == {"lr": 1}
    for bad in ("[1]", "nope", '{"a": NaN}', '{"a":1,"a":1}', "3"):
        with pytest.raises(InvalidParamsError):
            flags.parse_object(bad)

"""Params, flags and environment: what the script gets from whoever started it."""

import pytest

from overnight.core.errors import BadInputError, InvalidParamsError
from overnight.trainer.environment import read_environment
from overnight.trainer.params import Params, from_json, parse_flags, refuse_typos, resolve, usage

DEFAULTS = {"lr": 1e-3, "epochs": 3, "name": "adam", "fast": False, "tags": ["a"], "extra": None, "opt": {"beta": 0.9}}


def parsed(*argv: str) -> dict[str, object]:
    return parse_flags(argv, DEFAULTS).values


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--lr", "3"], {"lr": 3.0}),
        (["--lr=1e-4"], {"lr": 1e-4}),
        (["--lr", "-1"], {"lr": -1.0}),
        (["--epochs", "7"], {"epochs": 7}),
        (["--name", "--x"], {"name": "--x"}),
        (["--fast"], {"fast": True}),
        (["--fast", "false"], {"fast": False}),
        (["--no-fast"], {"fast": False}),
        (["--tags", '["b", 2]'], {"tags": ["b", 2]}),
        (["--extra", "17"], {"extra": 17}),
        (["--extra", "text"], {"extra": "text"}),
        (["--opt.beta", "0.5"], {"opt.beta": 0.5}),
        (["--opt", '{"beta": 1}'], {"opt": {"beta": 1}}),
        (["--lr", "1", "--lr", "2"], {"lr": 2.0}),
    ],
)
def test_flags_have_the_types_of_the_defaults(argv: list[str], values: dict[str, object]) -> None:
    assert parsed(*argv) == values
    assert [type(v) for v in parsed(*argv).values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lr", "fast"], "not a number"),
        (["--epochs", "1.5"], "not an integer"),
        (["--lr"], "no value"),
        (["--fast=maybe"], "neither true nor false"),
        (["--tags", "[1"], "not JSON"),
    ],
)
def test_a_bad_value_names_the_flag(argv: list[str], words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words) as caught:
        parse_flags(argv, DEFAULTS)
    assert argv[0].split("=")[0] in str(caught.value)


def test_unknown_flags_are_left_to_the_script() -> None:
    result = parse_flags(["data.txt", "--verbose", "--lr", "1", "-x", "--fresh", "--", "--epochs", "2"], DEFAULTS)
    assert result.rest == ["data.txt", "--verbose", "-x", "--", "--epochs", "2"]
    assert result.values == {"lr": 1.0}
    assert result.fresh


def test_dashes_and_underscores_are_one() -> None:
    assert parse_flags(["--batch-size", "4"], {"batch_size": 2}).values == {"batch_size": 4}


def test_given_values_overlay_defaults_without_touching_them() -> None:
    params = resolve(DEFAULTS, {"lr": 1, "opt.beta": 1, "new.name": 5, "extra": {"a": 1}})
    assert params["lr"] == 1.0 and isinstance(params["lr"], float)
    assert params["opt"] == {"beta": 1.0} and DEFAULTS["opt"] == {"beta": 0.9}
    assert params["new.name"] == 5


def test_dotted_names_reach_inside_and_a_missing_one_says_what_there_is() -> None:
    params = Params({"opt": {"beta": 0.5}, "lr": 1})
    assert params["opt.beta"] == 0.5
    with pytest.raises(KeyError, match=r"no param 'opt.gamma'; there are: lr, opt.beta"):
        params["opt.gamma"]
    assert params.get("opt.gamma") is None


@pytest.mark.parametrize(
    "given", [{"lr": "high"}, {"epochs": 0.5}, {"fast": 1}, {"epochs": True}, {"opt": 3}, {"lr": float("nan")}]
)
def test_a_value_of_another_type_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidParamsError):
        resolve(DEFAULTS, given)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_bad_json_params(text: str) -> None:
    with pytest.raises(InvalidParamsError):
        from_json(text)


def test_an_empty_environment_is_one_rank_alone() -> None:
    environment = read_environment({})
    assert (environment.rank, environment.world_size, environment.attempt, environment.alone) == (0, 1, None, True)


@pytest.mark.parametrize("env", [{"RANK": "one"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"OVERNIGHT_ATTEMPT": "x"}])
def test_an_impossible_environment_names_the_variable(env: dict[str, str]) -> None:
    with pytest.raises(BadInputError, match=next(iter(env))):
        read_environment(env)


def test_help_names_the_params_and_a_mistyped_one_is_refused() -> None:
    defaults = {"lr": 1e-3, "weight_decay": 0.0, "opt": {"name": "adamw"}}
    shown = usage("train.py", defaults)
    assert "--weight_decay  0.0" in shown
    assert "--opt.name" in shown
    refuse_typos(["--verbose", "--out=x", "data.csv", "--", "--lrr"], defaults)
    for word in ("--lrr", "--weight-deca", "--opt.nam=x"):
        with pytest.raises(InvalidParamsError, match="there is no param") as caught:
            refuse_typos([word, "3e-4"], defaults)
        assert "Did you mean --" in caught.value.hint

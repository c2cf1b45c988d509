"""Spec files: what they mean, and that everything wrong is named by file, line, key and remedy."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core import specfile, spectext
from overnight.core.enums import ArgsStyle, PriorityClass, RunKind
from overnight.core.errors import InvalidSpecError

FULL = """
experiment: nanogpt
run: python train.py            # or script:, module:
args: flags
python: .venv
code: {include: ["*.py", conf/], link: [data]}
compute: {gpus: 1, type: [h100, a100], max_time: 6h}
objective: {metric: val_loss, mode: min, reduce: best}
priority: exploratory
env: {WANDB_MODE: offline, WANDB_API_KEY: null, THREADS: 2}
sweep:
  planner: tpe
  trials: 60
  parallel: 8
  prune: {asha: {min_step: 1000}}
  stop: {consecutive_failures: 5, gpu_hours: 100}
  params:
    opt.lr: {log: [1e-5, 1e-2]}
    opt.name: [adamw, muon]
    opt.momentum: {range: [0.8, 0.99], when: opt.name == "muon"}
    model: [{depth: 12, width: 768}, {depth: 24, width: 512}]
    batch: 64
schedule: {cron: "0 22 * * 1-5", tz: Europe/Zurich, until: 08:00, overlap: skip}
"""


def test_the_whole_language():
    spec = specfile.parse(FULL)
    assert (spec.experiment, spec.run.kind, spec.run.target) == ("nanogpt", RunKind.SCRIPT, "train.py")
    assert spec.args is ArgsStyle.FLAGS
    assert spec.priority is PriorityClass.EXPLORATORY
    assert spec.compute.max_time_seconds == 6 * 3600
    assert (spec.include, spec.links) == (("*.py", "conf/"), ("data",))
    assert spec.env == {"WANDB_MODE": "offline", "THREADS": "2"}
    assert spec.inherit_env == ("WANDB_API_KEY",)
    assert spec.sweep is not None
    lr = spec.sweep.space["opt.lr"]
    assert (lr.kind, lr.low, lr.high) == ("log", 1e-5, 1e-2)
    assert spec.sweep.space["opt.momentum"].when == 'opt.name == "muon"'
    assert spec.sweep.space["model"].choices[1] == {"depth": 24, "width": 512}
    assert spec.sweep.fixed == {"batch": 64}
    assert spec.sweep.prune is not None
    assert spec.sweep.prune.min_step == 1000
    assert spec.schedule is not None
    assert spec.schedule.until == "08:00"


def test_toml_and_yaml_say_the_same():
    toml = """
experiment = "a"
script = "train.py --fast"
[params]
lr = 1e-3
[sweep.params]
"opt.lr" = { log = [1e-5, 1e-2] }
"""
    yaml = "experiment: a\nscript: train.py --fast\nparams: {lr: 1e-3}\nsweep: {params: {opt.lr: {log: [1e-5, 1e-2]}}}"
    assert specfile.parse(toml, name="x.toml") == specfile.parse(yaml)


@pytest.mark.parametrize(
    ("run", "kind", "target", "argv"),
    [
        ("python train.py --x 1", RunKind.SCRIPT, "train.py", ("--x", "1")),
        ("python3.12 train.py", RunKind.SCRIPT, "train.py", ()),
        ("python -m pkg.train 'a b'", RunKind.MODULE, "pkg.train", ("a b",)),
        ("/opt/py/bin/python train.py", RunKind.COMMAND, "/opt/py/bin/python", ("train.py",)),
        ("python -u train.py", RunKind.COMMAND, "python", ("-u", "train.py")),
        ("./train.sh --x", RunKind.COMMAND, "./train.sh", ("--x",)),
        ("[bash, -c, 'a | b > c']", RunKind.COMMAND, "bash", ("-c", "a | b > c")),
        ("train --lr=1e-3,2", RunKind.COMMAND, "train", ("--lr=1e-3,2",)),
    ],
)
def test_what_run_means(run, kind, target, argv):
    command = specfile.parse(f"experiment: a\nrun: {run}").run
    assert (command.kind, command.target, command.argv) == (kind, target, argv)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5s", 1.5), ("30m", 1800), ("6h", 21600), ("1d12h", 129600)]
)
def test_durations(text, seconds):
    assert specfile.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "6 hours", "h", "-1h", "1h1d", True, [1]])
def test_no_durations(text):
    with pytest.raises(ValueError, match="duration"):
        specfile.parse_duration(text)


BAD = [
    ("experimnt: a", ":1", "experimnt", "Did you mean 'experiment'?"),
    ("experiment: a\nrun: x\nrun: y", ":3", "twice (first on line 2)", ""),
    ("experiment: a\nrun: x\nscript: y", "", "run and script", ""),
    ("experiment: a", "", "exactly one of run, script, module", ""),
    ("run: x", "", "experiment is missing", "experiment:"),
    ("experiment: ../a\nrun: x", ":1", "'../a' is no name", ""),
    ("experiment: a\nrun: python a.py | tee x", ":2", "'|' needs a shell", ""),
    ("experiment: a\nrun: 'x \"y'", ":2", "cannot be split", ""),
    ("experiment: a\nrun: 5", ":2", "text or a list", ""),
    ("experiment: a\nrun: x\ncompute: {gpu: 1}", ":3", "'gpu' in compute", "Did you mean 'gpus'?"),
    ("experiment: a\nrun: x\ncompute:\n  gpus: 0", ":4", "compute.gpus", ""),
    ("experiment: a\nrun: x\ncompute: {gpus: 8-2}", ":3", "a range must rise", ""),
    ("experiment: a\nrun: x\ncompute: {nodes: 2}", ":3", "go together", ""),
    ("experiment: a\nrun: x\ncompute: {max_time: 6 hours}", ":3", "no duration", ""),
    ("experiment: a\nrun: x\npriority: urgnt", ":3", "priority", "Did you mean 'urgent'?"),
    ("experiment: a\nrun: x\nparams: {lr: .nan}", ":3", "params.lr is nan", "null"),
    ("experiment: a\nrun: x\nparams: {lr: 99999999999999999999}", ":3", "beyond 64 bits", "string"),
    ("experiment: a\nrun: x\nparams: {1: 2}", ":3", "the key 1 is no text", 'Quote it: "1"'),
    ("experiment: a\nrun: x\nparams: {<<: {a: 1}}", ":3", "merge keys", "extends"),
    ("experiment: a\nrun: x\nsweep: 5", ":3", "mapping", ""),
    ("experiment: a\nrun: x\nsweep:\n  params: {}", ":4", "sweep.params", ""),
    ("experiment: a\nrun: x\nsweep:\n  params: {a: 1}", ":4", "nothing to search", "log"),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    lr: {lgo: [1, 2]}", ":5", "sweep.params.lr", "Did you mean 'log'?"),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    lr: {log: [0, 2]}", ":5", "low > 0", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    lr: {log: [2]}", ":5", "two numbers", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    lr: {log: ['1', 2]}", ":5", "'1' is no number", "without quotes"),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    lr: {log: [1, 2], step: 1}", ":5", "'step' does not go", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    n: {int: [1, 2.5]}", ":5", "whole numbers", "range"),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    opt: {lr: {log: [1, 2]}}", ":5", "do not nest", "opt.lr"),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    n: [a, a]", ":5", "comes twice", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    n: []", ":5", "at least one", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    n: {int: [1, 2], when: opt == x}", ":5", "no param 'opt'", ""),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    o: [a]\n    n: {int: [1, 2], when: o == b}", ":6", "never", '"a"'),
    ("experiment: a\nrun: x\nsweep:\n  params:\n    n: {int: [1, 2], when: n == 1}", ":5", "depends on itself", ""),
    ("experiment: a\nrun: x\nsweep:\n  prune: asah\n  params: {a: [1]}", ":4", "no pruner", "Did you mean 'asha'?"),
    (
        "experiment: a\nrun: x\nsweep:\n  prune: {asha: {min: 1}}\n  params: {a: [1]}",
        ":4",
        "no option 'min'",
        "min_step",
    ),
    ("experiment: a\nrun: x\nsweep:\n  stop: {gpu_hour: 3}\n  params: {a: [1]}", ":4", "gpu_hour", "gpu_hours"),
    ("experiment: a\nrun: x\nschedule: {cron: '* * * * *'}", "", "add a 'sweep:' block", ""),
    ("experiment: a\nrun: x\nenv: {A: [1]}", ":3", "cannot be a variable", ""),
    ("experiment: a\nrun: x\nobjective: {mode: min}", ":3", "objective.metric is missing", "metric"),
    ("experiment: a\nrun: x\nobjective: {metric: x, source: pattern, pattern: '('}", ":3", "no regular expression", ""),
    ("experiment: a\nrun: x\nextends: b.yaml", ":3", "extends", ""),
    ("- a", "", "holds no mapping", ""),
    ("a: b: c", ":1", "mapping values are not allowed", "quotes"),
    ("a:\n\t- b", ":2", "cannot start any token", "spaces"),
    ("a: [1, 2", ":1", "not YAML", ""),
    ("a: 1\n---\nb: 2", ":2", "not YAML", ""),
    ("a: \x07", "", "not YAML", ""),
    ("a: " + "9" * 5000, ":1", "5000 digits", ""),
    ("a: *nowhere", ":1", "undefined alias", ""),
]


@pytest.mark.parametrize(("text", "line", "message", "hint"), BAD, ids=[repr(case[0][-40:]) for case in BAD])
def test_what_is_wrong_is_named(text, line, message, hint):
    with pytest.raises(InvalidSpecError) as caught:
        specfile.parse(text, name="my.yaml")
    assert caught.value.message.startswith(f"my.yaml{line}"), caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch /tmp/owned']",
        "a: !x 1",
        "!!python/name:os.system {}",
        "a: &a [*a]",
        "a: &a {b: *a}",
        "[" * 5000,
        "a: " + "{a: " * 3000,
        "\n".join(["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
                  + [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]),
        "x" * (2 * 1024 * 1024),
    ],
    ids=["python", "tag", "name", "circle", "circle-map", "deep", "deep-map", "bomb", "large"],
)  # fmt: skip
def test_hostile_yaml_is_an_error_and_quick(text):
    with pytest.raises(InvalidSpecError):
        specfile.parse(text)


def test_how_long_a_silence_is_a_hang():
    text = "experiment: a\nrun: python x.py\ncompute: {hang: %s}"
    assert specfile.parse("experiment: a\nrun: python x.py").compute.hang_seconds == 600
    assert specfile.parse(text % "1h30m").compute.hang_seconds == 5400
    assert specfile.parse(text % "0").compute.hang_seconds == 0


def test_toml_errors_name_the_line_or_the_key():
    with pytest.raises(InvalidSpecError, match=r"x\.toml:2: not TOML"):
        specfile.parse("experiment = 'a'\nexperiment = 'b'\nrun = 'x'", name="x.toml")
    with pytest.raises(InvalidSpecError, match=r"params\.day is a date"):
        specfile.parse("experiment = 'a'\nrun = 'x'\n[params]\nday = 2026-11-29", name="x.toml")
    with pytest.raises(InvalidSpecError, match=r"x\.toml: compute\.gpus"):
        specfile.parse("experiment = 'a'\nrun = 'x'\n[compute]\ngpus = 0", name="x.toml")


def test_yaml_scalars_follow_version_1_2():
    text = "a: 1e-5\nb: on\nc: 08:00\nd: 0x10\ne: '1'\nf: ~\ng: true\nh: yes\ni: 1_000\nj: 2026-11-29\nk: 007\nl:"
    assert spectext.parse(text, "x.yaml").data == {
        "a": 1e-5, "b": "on", "c": "08:00", "d": 16, "e": "1", "f": None, "g": True, "h": "yes", "i": "1_000",
        "j": "2026-11-29", "k": 7, "l": None,
    }  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co", "Cn"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text("abcdef", min_size=1, max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_json_is_read_as_it_is(value):
    text = json.dumps({"value": value}, ensure_ascii=True)
    assert spectext.parse(text, "x.json").data == {"value": value}


@given(st.text(max_size=200))
def test_any_text_parses_or_says_why(text):
    for name in ("x.yaml", "x.toml"):
        try:
            specfile.parse(text, name=name)
        except InvalidSpecError as error:
            assert error.message.startswith(name)


def test_extends_merges_and_keeps_the_lines_of_each_file():
    files = {
        "base.yaml": "experiment: a\nrun: python a.py\ncompute:\n  gpus: 2\n  max_time: 1h\nparams: {lr: 1, n: 2}",
        "mid.yaml": "extends: base.yaml\nscript: b.py\nparams: {lr: 3}",
    }

    def load(name, referrer):
        return files[name], name

    spec = specfile.parse("extends: mid.yaml\ncompute: {gpus: 4}", load=load)
    assert (spec.run.target, spec.compute.gpus, spec.compute.max_time_seconds) == ("b.py", 4, 3600)
    assert spec.params == {"lr": 3, "n": 2}
    files["base.yaml"] += "\npriority: none"
    with pytest.raises(InvalidSpecError, match=r"base\.yaml:7: priority"):
        specfile.parse("extends: mid.yaml", load=load)


def test_extends_in_a_circle():
    def load(name, referrer):
        return f"extends: {'b' if name == 'a.yaml' else 'a'}.yaml", name

    with pytest.raises(InvalidSpecError, match="extends itself"):
        specfile.parse("extends: a.yaml", load=load)


def test_the_schema_knows_every_key_and_the_example_fits_it():
    schema = specfile.json_schema()
    assert set(schema["properties"]) == set(specfile.SpecFile.model_fields)
    assert schema["additionalProperties"] is False
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("bad.json", '{"experiment": "a",}', '"script"'),
        ("bad.json", "[1]", '"script"'),
        ("bad.json", '{"experiment": "a", "experiment": "b"}', "one of the two"),
        ("bad.toml", "experiment = a", "double quotes"),
        ("bad.yaml", "a: \x00", "--schema"),
    ],
)
def test_a_file_that_does_not_parse_has_a_hint_about_specs(name, text, words):
    with pytest.raises(InvalidSpecError) as caught:
        spectext.parse(text, name)
    assert words in caught.value.hint and "lr" not in caught.value.hint

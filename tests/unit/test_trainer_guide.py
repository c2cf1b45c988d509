"""Every code block of the training guide runs, with what it says about it."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from trainer_ranks import Lab, shared_lab

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
SCRIPT = BLOCKS[0][1]
FRAGMENTS = [text for language, text in BLOCKS[1:] if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
SETUP = """
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = trainer.DataLoader(Points(), batch_size=32, shuffle=True)
"""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def log(folder: Path) -> str:
    return (folder / "log").read_text() if (folder / "log").exists() else ""


def test_the_guide_is_short_and_every_block_is_run() -> None:
    assert len(GUIDE.read_text().splitlines()) <= 150
    assert {language for language, _ in BLOCKS} == {"python", "sh"}
    assert SCRIPT.startswith("# train.py\n") and len(FRAGMENTS) == 6 and len(COMMANDS) == 3


def test_the_script_goes_on_where_it_stopped(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert lab.run(tmp_path / "train.py", tmp_path) == [0], log(tmp_path)
    assert lab.run(tmp_path / "train.py", tmp_path) == [0], log(tmp_path)
    assert "no update was left to do after step 24" in log(tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=[command.split()[0] for command in COMMANDS])
def test_commands(lab: Lab, tmp_path: Path, command: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program, _, rest = command.partition(" ")
    if program == "overnight":
        whole = [sys.executable, "-m", "overnight", *rest.split()]
        done = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = 1
    else:
        options, argv = rest.split("train.py")
        ranks = int(options.split()[-1]) if program == "torchrun" else 1
        assert lab.run(script, tmp_path, *argv.split(), ranks=ranks) == [0] * ranks, log(tmp_path)
    (weights,) = tmp_path.glob(".overnight/train/*/attempts/0001/final.json")
    assert f'"step": {24 // ranks},' in weights.read_text()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", range(len(FRAGMENTS)))
def test_fragments(lab: Lab, tmp_path: Path, number: int, ranks: int) -> None:
    before, _, _ = SCRIPT.partition("def main():")
    body = textwrap.indent(SETUP + FRAGMENTS[number], "    ")
    script = tmp_path / "fragment.py"
    script.write_text(f'{before}\nwith trainer.run(defaults={{"lr": 0.1}}) as run:\n{body}')
    assert lab.run(script, tmp_path, ranks=ranks) == [0] * ranks, log(tmp_path)

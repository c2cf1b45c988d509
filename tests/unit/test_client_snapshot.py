"""Code snapshots: the right files, one hash for the same files, and nothing that leaves the folder."""

import hashlib
import io
import os
import subprocess
import tarfile

import pytest

from overnight.agents import snapshot
from overnight.core.errors import BadInputError, ScriptError


def write(root, *names, text="x"):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names_of(taken):
    return [file.name for file in taken.files]


def git(root, *words):
    env = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True, env=env)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def test_the_default_files_outside_git(root):
    write(root, "train.py", "conf/a.yaml", "pkg/mod.py", "run.sh", "weights.pt", "pkg/__pycache__/mod.pyc")
    write(root, ".overnight/x.py", ".venv/pyvenv.cfg", ".venv/lib/big.py", "__pycache__/y.py", ".git/z.py")
    assert names_of(snapshot.take(root)) == ["conf/a.yaml", "pkg/mod.py", "run.sh", "train.py"]


def test_git_says_what_is_ignored_and_untracked_files_count(root):
    git(root, "init", "-q")
    write(root, ".gitignore", text="secret.py\nbuild/\n")
    write(root, "train.py", "secret.py", "build/gen.py", "new.py", "gone.py")
    git(root, "add", "train.py", ".gitignore", "gone.py")
    git(root, "commit", "-qm", "first")
    (root / "gone.py").unlink()
    taken = snapshot.take(root)
    assert names_of(taken) == ["new.py", "train.py"]
    assert taken.git is not None
    assert taken.git.dirty
    assert len(taken.git.commit) == 40
    git(root, "add", "-A")
    git(root, "commit", "-qm", "second")
    clean = snapshot.take(root)
    assert clean.git is not None
    assert not clean.git.dirty
    assert clean.digest == taken.digest, "a commit alone must not change what the code is"


def test_the_same_files_have_the_same_hash_whenever_and_wherever(tmp_path):
    for place in ("one", "two"):
        write(tmp_path / place, "b.py", "a/c.py", text="same")
    os.utime(tmp_path / "one" / "b.py", (1, 1))
    first, second = snapshot.take(tmp_path / "one"), snapshot.take(tmp_path / "two")
    assert first.digest == second.digest
    assert hashlib.sha256(first.read()).hexdigest() == first.digest
    with tarfile.open(fileobj=io.BytesIO(first.read())) as tar:
        members = tar.getmembers()
        assert [(m.name, m.mode, m.mtime, m.uid, m.uname) for m in members] == [
            ("a/c.py", 0o644, 0, 0, ""),
            ("b.py", 0o644, 0, 0, ""),
        ]
    (tmp_path / "two" / "b.py").chmod(0o755)
    assert snapshot.take(tmp_path / "two").digest != first.digest


def test_an_edit_after_the_snapshot_is_noticed(root):
    write(root, "train.py", text="old")
    taken = snapshot.take(root)
    write(root, "train.py", text="new")
    with pytest.raises(ScriptError, match="changed while"):
        taken.read()


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.py"], ["a.py", "src/b.py", "src/deep/c.py"]),
        (["src/*.py"], ["src/b.py"]),
        (["src/**/*.py"], ["src/b.py", "src/deep/c.py"]),
        (["./src/"], ["src/b.py", "src/deep/c.py", "src/x.bin"]),
        (["a.py", "src/x.bin"], ["a.py", "src/x.bin"]),
    ],
)
def test_patterns(root, patterns, expected):
    write(root, "a.py", "src/b.py", "src/deep/c.py", "src/x.bin")
    assert names_of(snapshot.take(root, include=patterns)) == expected


def test_a_pattern_that_fits_nothing_is_an_error(root):
    write(root, "a.py")
    with pytest.raises(BadInputError, match=r"no file fits 'conf/'"):
        snapshot.take(root, include=["*.py", "conf/"])


def test_the_script_is_in_whatever_the_patterns_say(root):
    write(root, "train.py", "conf/a.yaml")
    assert names_of(snapshot.take(root, include=["conf/"], required=["train.py"])) == ["conf/a.yaml", "train.py"]
    with pytest.raises(BadInputError, match="leaves the folder"):
        snapshot.take(root, required=["../x.py"])
    with pytest.raises(ScriptError):
        snapshot.take(root, required=["none.py"])


def test_symlinks_inside_are_copied_and_those_that_leave_are_refused(root, tmp_path):
    write(root, "real.py", text="content")
    (root / "alias.py").symlink_to("real.py")
    taken = snapshot.take(root)
    with tarfile.open(fileobj=io.BytesIO(taken.read())) as tar:
        assert tar.getmember("alias.py").isreg()
        assert tar.extractfile("alias.py").read() == b"content"
    write(tmp_path, "secret.py")
    (root / "leak.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(BadInputError, match=r"leak\.py is a symlink that leaves"):
        snapshot.take(root)


def test_a_linked_folder_is_not_entered_and_links_are_not_copied(root, tmp_path):
    write(tmp_path, "data/big.txt")
    (root / "data").symlink_to(tmp_path / "data")
    write(root, "train.py", "small/notes.txt")
    taken = snapshot.take(root, links=["data", "small/"])
    assert names_of(taken) == ["train.py"]
    assert taken.links == {"data": str(tmp_path / "data"), "small": str(root / "small")}
    with pytest.raises(BadInputError, match="there is no 'nothing'"):
        snapshot.take(root, links=["nothing"])


def test_a_symlink_circle_is_an_error_and_no_hang(root):
    (root / "a.py").symlink_to("b.py")
    (root / "b.py").symlink_to("a.py")
    with pytest.raises((ScriptError, BadInputError, OSError, RuntimeError)):
        snapshot.take(root)


def test_too_much_is_named(root, monkeypatch):
    write(root, "a.py", "b.py", "large.txt", text="y" * 1000)
    monkeypatch.setattr(snapshot, "MAX_BYTES", 2000)
    with pytest.raises(BadInputError, match="largest file is"):
        snapshot.take(root)
    monkeypatch.setattr(snapshot, "MAX_BYTES", 10_000)
    monkeypatch.setattr(snapshot, "MAX_FILES", 2)
    with pytest.raises(BadInputError, match="3 files, more than 2"):
        snapshot.take(root)
    monkeypatch.setattr(snapshot, "MAX_VISITED", 2)
    with pytest.raises(BadInputError, match="holds more than"):
        snapshot.take(root)


def test_the_cache_is_used_and_never_for_fresh_files(root, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    write(root, "a.py", text="one")
    newest = (root / "a.py").stat().st_mtime
    fresh = snapshot.take(root, cache=cache, now=lambda: newest + 0.5)
    assert not list(cache.glob("*")) if cache.exists() else True
    snapshot.take(root, cache=cache, now=lambda: newest + 60)
    assert len(list(cache.glob("*.json"))) == 1

    def never(files):
        raise AssertionError("packed again")

    monkeypatch.setattr(snapshot, "pack", never)
    assert snapshot.take(root, cache=cache, now=lambda: newest + 90).digest == fresh.digest
    write(root, "a.py", text="longer")
    with pytest.raises(AssertionError, match="packed again"):
        snapshot.take(root, cache=cache, now=lambda: newest + 90)


def test_a_broken_cache_only_costs_time(root, tmp_path):
    cache = tmp_path / "cache"
    write(root, "a.py")
    later = (root / "a.py").stat().st_mtime + 60
    digest = snapshot.take(root, cache=cache, now=lambda: later).digest
    for entry in cache.glob("*.json"):
        entry.write_text("{")
    assert snapshot.take(root, cache=cache, now=lambda: later).digest == digest
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert snapshot.take(root, cache=blocked, now=lambda: later).digest == digest


def test_odd_file_names(root):
    write(root, "a b.py", "ü.py", "[x].py", "new\nline.py", "-rf.py")
    taken = snapshot.take(root)
    with tarfile.open(fileobj=io.BytesIO(taken.read())) as tar:
        assert sorted(tar.getnames()) == sorted(names_of(taken)) == sorted(path.name for path in root.iterdir())


def test_pipes_and_sockets_are_passed_over(root):
    write(root, "train.py")
    os.mkfifo(root / "pipe.yaml")
    assert names_of(snapshot.take(root)) == ["train.py"]

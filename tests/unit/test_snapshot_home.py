"""A home beside the script holds every earlier snapshot: taken for code, it would double with each submission."""

from pathlib import Path

from overnight.agents.snapshot import take


def test_a_home_inside_the_code_is_no_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    copy = tmp_path / "home" / "code" / "0" / "tree" / "train.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("pass")
    (tmp_path / "homes.py").write_text("pass")
    names = [file.name for file in take(tmp_path, without=tmp_path / "home").files]
    assert names == ["homes.py", "train.py"]
    assert len(take(tmp_path, without=Path("/elsewhere")).files) == 3
    assert len(take(tmp_path, without=tmp_path).files) == 3, "a home that is the folder itself hides nothing"

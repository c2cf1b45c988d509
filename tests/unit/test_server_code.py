"""Code snapshots: verified, bounded, published whole, and unable to leave their folder."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from overnight.core.errors import BadInputError, InvalidSpecError, NotFoundError
from overnight.core.paths import Home
from overnight.platform import code
from overnight.platform.code import CodeStore


def tar_of(files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in extra or []:
            tar.addfile(info)
    return buffer.getvalue()


def put(store: CodeStore, data: bytes, digest: str | None = None) -> str:
    digest = digest or hashlib.sha256(data).hexdigest()
    with store.receive(digest) as upload:
        for start in range(0, len(data), 1000):
            upload.write(data[start : start + 1000])
        upload.commit()
    return digest


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def store(home: Home) -> CodeStore:
    return CodeStore(home)


def leftovers(home: Home) -> list[str]:
    return [p.name for p in home.code.iterdir() if p.name.startswith(".")]


def test_a_snapshot_arrives_whole(store: CodeStore, home: Home) -> None:
    digest = put(store, tar_of({"train.py": b"print(1)", "conf/a.yaml": b"x: 1"}))
    assert store.has(digest)
    store.require(digest)
    assert (home.code_dir(digest) / "conf" / "a.yaml").read_bytes() == b"x: 1"
    assert leftovers(home) == []


def test_half_the_digits_name_it_too_and_twice_is_fine(store: CodeStore) -> None:
    data = tar_of({"a.py": b""})
    digest = hashlib.sha256(data).hexdigest()[:32]
    assert put(store, data, digest) == put(store, data, digest)
    assert store.has(digest)


def test_one_flipped_byte_publishes_nothing(store: CodeStore, home: Home) -> None:
    data = bytearray(tar_of({"a.py": b"print(1)"}))
    digest = hashlib.sha256(data).hexdigest()
    data[600] ^= 1
    with pytest.raises(BadInputError, match="arrived as"):
        put(store, bytes(data), digest)
    assert not store.has(digest) and leftovers(home) == []
    with pytest.raises(NotFoundError, match=digest):
        store.require(digest)


def test_a_cut_upload_leaves_nothing(store: CodeStore, home: Home) -> None:
    with pytest.raises(ConnectionError), store.receive("a" * 64) as upload:
        upload.write(b"half")
        raise ConnectionError
    assert not store.has("a" * 64) and leftovers(home) == []


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "extra",
    [
        [tarfile.TarInfo("../escape")],
        [link("a", "/etc/passwd")],
        [link("a", "../../x")],
        [link("a", "b", tarfile.LNKTYPE)],
        [link("a", "", tarfile.CHRTYPE)],
        [link("a", "", tarfile.FIFOTYPE)],
    ],
    ids=["dotdot", "absolute-link", "link-out", "hard-link", "device", "fifo"],
)
def test_nothing_leaves_the_folder(store: CodeStore, home: Home, extra: list[tarfile.TarInfo]) -> None:
    data = tar_of({"ok.py": b"1"}, extra)
    with pytest.raises(BadInputError):
        put(store, data)
    assert not store.has(hashlib.sha256(data).hexdigest())
    assert not (home.root / "escape").exists() and leftovers(home) == []


def test_absolute_names_stay_inside(store: CodeStore, home: Home) -> None:
    digest = put(store, tar_of({"/train.py": b"1"}))
    assert (home.code_dir(digest) / "train.py").read_bytes() == b"1"


@pytest.mark.parametrize("data", [b"", b"not a tar", b"\x1f\x8b" + b"0" * 600], ids=["empty", "text", "gzip"])
def test_not_a_tar(store: CodeStore, data: bytes) -> None:
    with pytest.raises(BadInputError):
        put(store, data)


def test_too_large_packed_or_unpacked(store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 5000)
    with pytest.raises(BadInputError, match="larger"):
        put(store, tar_of({"a": b"x" * 6000}))
    monkeypatch.setattr(code, "MAX_FILES", 2)
    monkeypatch.setattr(code, "MAX_BYTES", 50_000)
    with pytest.raises(BadInputError, match="3 files"):
        put(store, tar_of({"a": b"", "b": b"", "c": b""}))


@pytest.mark.parametrize("digest", ["", "..", "../" + "a" * 32, "A" * 64, "a" * 31, "a" * 65, "g" * 64])
def test_only_hashes_are_names(store: CodeStore, digest: str) -> None:
    assert not store.has(digest)
    with pytest.raises(InvalidSpecError):
        store.receive(digest)


def test_clean_removes_what_a_killed_server_left(store: CodeStore, home: Home) -> None:
    upload = store.receive("b" * 64)
    upload.write(b"half")
    assert leftovers(home)
    store.clean()
    assert leftovers(home) == []
    with upload:
        pass

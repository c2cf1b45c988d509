"""Which file systems may hold the database."""

from pathlib import Path

import pytest

from overnight.core.errors import NetworkFilesystemError
from overnight.store.filesystems import is_network, require_local, type_of

MOUNTS = r"""
/dev/vda / ext4 rw,relatime 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local xfs rw 0 0
box: /mnt/with\040space fuse.sshfs rw 0 0
/dev/sdc /twice ext4 rw 0 0
//nas/x /twice cifs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/tmp/x/y", "tmpfs"),
        ("/home/me/.overnight", "nfs4"),
        ("/homely", "ext4"),
        ("/home/local/x", "xfs"),
        ("/mnt/with space/x", "fuse.sshfs"),
        ("/twice/x", "cifs"),
    ],
)
def test_the_deepest_and_newest_mount_counts(path: str, kind: str) -> None:
    assert type_of(Path(path), MOUNTS) == kind


NETWORK = "nfs nfs4 cifs smb3 lustre 9p ceph gpfs beegfs fuse.sshfs fuse.s3fs fuse.glusterfs fuse.rclone"
LOCAL = "ext4 xfs btrfs zfs tmpfs overlay apfs fuse.lxcfs fuseblk fuse.gocryptfs"


def test_network_types() -> None:
    assert [kind for kind in NETWORK.split() if not is_network(kind)] == []


def test_local_types() -> None:
    assert [kind for kind in LOCAL.split() if is_network(kind)] == []


def test_the_refusal_names_the_way_out() -> None:
    with pytest.raises(NetworkFilesystemError) as caught:
        require_local(Path("/home/me/.overnight"), MOUNTS)
    assert "nfs4" in caught.value.message
    assert "OVERNIGHT_HOME" in caught.value.hint
    assert caught.value.details == {"path": "/home/me/.overnight", "filesystem": "nfs4"}


def test_this_machine_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("overnight.store.filesystems.MOUNTS", tmp_path / "missing")
    require_local(tmp_path)


def test_a_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/home/me")
    with pytest.raises(NetworkFilesystemError):
        require_local(link / "x", MOUNTS)

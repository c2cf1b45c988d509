"""Which file system a path is on, because SQLite's locks and shared memory are not kept by network ones.

See https://www.sqlite.org/useovernet.html and https://www.sqlite.org/wal.html ("WAL does not work over a network
filesystem"): two processes on two machines, or one after a lost connection, can both believe to hold the lock.
"""

import re
from pathlib import Path

from overnight.core.errors import NetworkFilesystemError

MOUNTS = Path("/proc/self/mounts")

NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs", "davfs"),
        *("lustre", "ceph", "gpfs", "beegfs", "fhgfs", "glusterfs", "orangefs", "pvfs2", "panfs", "quobyte", "wekafs"),
        *("gfs", "gfs2", "ocfs2", "acfs", "vboxsf", "vmhgfs"),
    }
)
"""Types of ``/proc/mounts`` that are served from elsewhere."""

NETWORK_FUSE = re.compile(
    r"fuse\.(.*(sshfs|s3|gcs|rclone|gluster|ceph|juicefs|davfs|mergerfs|goofys|blob|smb|nfs|weka|quobyte|seaweed|moose)"
    r".*)"
)


def type_of(path: Path, mounts: str) -> str | None:
    """Type of the file system that holds ``path``.

    Args:
        path: Absolute, symlinks resolved; it need not exist.
        mounts: Text in the format of ``/proc/mounts``; of two mounts on one point the later one counts.

    Returns:
        The type's name, or None when no mount point covers the path.
    """
    best, found = -1, None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        depth = len(point.parts)
        if depth >= best and path.is_relative_to(point):
            best, found = depth, fields[2]
    return found


def is_network(kind: str) -> bool:
    """Whether a type's name stands for a network file system."""
    return kind in NETWORK_TYPES or NETWORK_FUSE.fullmatch(kind) is not None


def require_local(path: Path, mounts: str | None = None) -> None:
    """Refuses a place that cannot hold an SQLite database.

    Args:
        path: The database's file or folder.
        mounts: For tests; read from the kernel if None. Without ``/proc`` nothing is refused.

    Raises:
        NetworkFilesystemError: The file system is a network one.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return
    kind = type_of(path.resolve(), mounts)
    if kind is not None and is_network(kind):
        raise NetworkFilesystemError(
            f"{path} is on a network file system ({kind}), where SQLite can lose or damage the database",
            hint="Set OVERNIGHT_HOME to a local disk, or keep the store in PostgreSQL: "
            "OVERNIGHT_STORE_URL=postgresql://user@host/overnight",
            path=str(path),
            filesystem=kind,
        )

"""The layout of a home. Pure path arithmetic: nothing here touches the disk."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """Where things are under ``OVERNIGHT_HOME``."""

    root: Path

    @property
    def settings_file(self) -> Path:
        """Optional TOML settings."""
        return self.root / "overnight.toml"

    @property
    def server_file(self) -> Path:
        """``{"url", "pid", "start", "boot", "version"}`` of the server, written once it listens."""
        return self.root / "server.json"

    @property
    def token_file(self) -> Path:
        """The operator's bearer token, mode 0600."""
        return self.root / "token"

    @property
    def server_lock(self) -> Path:
        """Held (flock) by the server for its life; holds its identity as JSON."""
        return self.root / "server.lock"

    @property
    def up_lock(self) -> Path:
        """Held (flock) by ``overnight up`` for its life."""
        return self.root / "up.lock"

    @property
    def node_lock(self) -> Path:
        """Held (flock) by the node daemon for its life; holds its identity as JSON."""
        return self.root / "node.lock"

    @property
    def logs(self) -> Path:
        """``server.log node.log outbox.log planner.log zygote-*.log``."""
        return self.root / "logs"

    @property
    def code(self) -> Path:
        """Code snapshots by hash."""
        return self.root / "code"

    @property
    def faults_file(self) -> Path:
        """Scripted faults of a fake pool, JSON lines."""
        return self.root / "faults.jsonl"

    def code_dir(self, digest: str) -> Path:
        """The unpacked snapshot; read-only by convention, trials get a copy."""
        return self.code / digest

    def trial_dir(self, trial_id: str) -> Path:
        """The trial's persistent folder: what a script sees as ``OVERNIGHT_TRIAL_DIR``."""
        return self.root / "trials" / trial_id

    def checkpoints(self, trial_id: str) -> Path:
        """The trial's checkpoint place."""
        return self.trial_dir(trial_id) / "checkpoints"

    def attempt_dir(self, trial_id: str, number: int) -> Path:
        """Folder of one attempt: order, pids, spool, exit, output."""
        return self.trial_dir(trial_id) / "attempts" / f"{number:04d}"

    @property
    def socket_dir(self) -> Path:
        """A short folder for Unix sockets (their paths end at 107 bytes), one per home, mode 0700."""
        return Path("/tmp") / f"overnight-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"

    @property
    def node_socket(self) -> Path:
        """The node daemon's control socket."""
        return self.socket_dir / "node.sock"

"""The tables, in SQLAlchemy Core with types that SQLite and PostgreSQL share.

Core and not the ORM: every write is set-based, and the ORM costs five times as much per row. The schema that a
database really has comes from the migrations; a test keeps the two equal.
"""

import json
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""Names of constraints, so that migrations can change them on every database."""

metadata = sa.MetaData(naming_convention=NAMING)


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """Aware datetimes in UTC, whatever the database and its session's zone make of them."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Refuses a naive time: guessing its zone would shift it silently."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; times are aware UTC")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """SQLite gives back what it was given, without the zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class JsonText(sa.types.TypeDecorator[Any]):
    """JSON as text: sorted keys, no spaces, the same bytes on every database.

    Foreign prose (notes, causes, descriptions) is kept in this type too, as a JSON string: PostgreSQL's text cannot
    hold a NUL, and such text must come back as it was given. None is SQL NULL.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Serialises; a lone surrogate, which no encoding of a database can hold, stays an escape."""
        if value is None:
            return None
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Parses."""
        return None if value is None else json.loads(value)


def storable(text: str, limit: int = 1_000) -> str:
    """Text for a plain column: what no database can hold becomes U+FFFD, and the length is bounded.

    Args:
        text: A name or key that came from outside.
        limit: Longest result in characters.
    """
    return text[:limit].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


ID = sa.String(64)
WORD = sa.String(32)
SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # an INTEGER PRIMARY KEY is SQLite's own row id

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", WORD, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
    comment="Last number given out per sequence. A database's own sequences have gaps and commit out of order.",
)

leaders = sa.Table(
    "leaders",
    metadata,
    sa.Column("name", WORD, primary_key=True),
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("counter", sa.BigInteger, nullable=False),
    sa.Column("acquired_at", UtcDateTime, nullable=False),
    sa.Column("renewed_at", UtcDateTime, nullable=False),
)

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("name", sa.String(100), nullable=False, unique=True),
    sa.Column("objective", JsonText),
    sa.Column("description", JsonText, nullable=False),
    sa.Column("trials_made", sa.Integer, nullable=False, server_default="0"),
    sa.Column("mlflow_experiment_id", sa.String(250)),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("experiment_id", ID, sa.ForeignKey("experiments.id"), nullable=False, index=True),
    sa.Column("parent_id", ID, sa.ForeignKey("sweeps.id"), index=True),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("key", JsonText),
    sa.Column("body_hash", sa.String(64)),
    sa.Column("config", JsonText, nullable=False),
    sa.Column("sweep", JsonText, nullable=False),
    sa.Column("schedule", JsonText),
    sa.Column("state", WORD, nullable=False, index=True),
    sa.Column("cause", JsonText, nullable=False),
    sa.Column("proposed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("next_run_at", UtcDateTime),
    sa.UniqueConstraint("actor", "key"),
)

proposals = sa.Table(
    "proposals",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("experiment_id", ID, sa.ForeignKey("experiments.id"), nullable=False, index=True),
    sa.Column("sweep_id", ID, sa.ForeignKey("sweeps.id"), index=True),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("key", JsonText),
    sa.Column("body_hash", sa.String(64)),
    sa.Column("status", WORD, nullable=False),
    sa.Column("hint", JsonText, nullable=False),
    sa.Column("note", JsonText, nullable=False),
    sa.Column("trial_ids", JsonText, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("actor", "key"),
)

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("experiment_id", ID, sa.ForeignKey("experiments.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("name", sa.String(120), nullable=False),
    sa.Column("sweep_id", ID, sa.ForeignKey("sweeps.id"), index=True),
    sa.Column("proposal_id", ID, sa.ForeignKey("proposals.id"), nullable=False, index=True),
    sa.Column("config", JsonText, nullable=False),
    sa.Column("params", JsonText, nullable=False),
    sa.Column("config_hash", sa.String(64), nullable=False),
    sa.Column("replicate", sa.Integer, nullable=False),
    sa.Column("state", WORD, nullable=False),
    sa.Column("state_cause", JsonText, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False, unique=True, comment="Sequence of the event that made it."),
    sa.Column("priority", sa.SmallInteger, nullable=False, comment="Index in CLASS_ORDER; 0 runs first."),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("place", sa.BigInteger, nullable=False, comment="Sequence of the event that queued it."),
    sa.Column("not_before", UtcDateTime, comment="Backoff after an infrastructure fault."),
    sa.Column("tracked", sa.Boolean, nullable=False, comment="Its state is tracked: it can yield and resume."),
    sa.Column("value", sa.Float),
    sa.Column("step", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("phase", sa.String(64)),
    sa.Column("attempts_made", sa.Integer, nullable=False, server_default="0"),
    sa.Column("retries_used", sa.Integer, nullable=False, server_default="0"),
    sa.Column("preemptions", sa.Integer, nullable=False, server_default="0"),
    sa.Column("error", JsonText),
    sa.Column("mlflow_run_id", sa.String(64)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("started_at", UtcDateTime),
    sa.Column("ended_at", UtcDateTime),
    sa.UniqueConstraint("experiment_id", "number"),
    sa.UniqueConstraint("name"),
    sa.Index(None, "experiment_id", "config_hash"),
    sa.Index(None, "state", "priority", "rank", "place"),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("boot_id", sa.String(64), nullable=False),
    sa.Column("version", sa.String(64), nullable=False),
    sa.Column("connected", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("seen_at", UtcDateTime),
)

devices = sa.Table(
    "devices",
    metadata,
    sa.Column("id", sa.String(250), primary_key=True),
    sa.Column("node_id", ID, sa.ForeignKey("nodes.id"), nullable=False),
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("kind", WORD, nullable=False),
    sa.Column("type", sa.String(100), nullable=False),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("uuid", sa.String(100), nullable=False),
    sa.Column("state", WORD, nullable=False),
    sa.Column("cause", JsonText, nullable=False),
    sa.Column("evidence", JsonText, nullable=False),
    sa.Column("until", UtcDateTime),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.UniqueConstraint("node_id", "index"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("trial_id", ID, sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("node_id", ID, sa.ForeignKey("nodes.id"), nullable=False),
    sa.Column("dir", JsonText),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("started_at", UtcDateTime),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("outcome", WORD),
    sa.Column("cause", JsonText, nullable=False),
    sa.Column("exit_codes", JsonText, nullable=False),
    sa.Column("error", JsonText),
    sa.Column("exit", JsonText, comment="The exit event's data, kept until the attempt is ended from it."),
    sa.Column("acked", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("directive", JsonText, nullable=False),
    sa.UniqueConstraint("trial_id", "number"),
    sa.Index(
        "ix_attempts_live",
        "node_id",
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    ),
)

generations = sa.Table(
    "generations",
    metadata,
    sa.Column("trial_id", ID, sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("fork_step", sa.BigInteger, comment="Step of the checkpoint that it restored; 0 is from scratch."),
    sa.Column("parent_attempt", sa.Integer, comment="Whose checkpoint that was; 0 is nobody's, NULL not told."),
    sa.Column("parent_generation", sa.Integer),
    sa.Column("first_step", sa.BigInteger, comment="The lowest step that it logged."),
    sa.Column("started_at", UtcDateTime),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("attempt_id", ID, sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("state", WORD, nullable=False),
    sa.Column("heartbeat", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("released_at", UtcDateTime),
    sa.Column("clean_at", UtcDateTime),
    sa.Index(
        "ix_leases_unclean",
        "state",
        sqlite_where=sa.text("state <> 'clean'"),
        postgresql_where=sa.text("state <> 'clean'"),
    ),
)

lease_devices = sa.Table(
    "lease_devices",
    metadata,
    sa.Column("attempt_id", ID, sa.ForeignKey("leases.attempt_id"), primary_key=True),
    sa.Column("device_id", sa.String(250), sa.ForeignKey("devices.id"), primary_key=True),
    sa.Column("clean", sa.SmallInteger, nullable=False, server_default="0"),
    sa.Index(
        "uq_lease_devices_live",
        "device_id",
        unique=True,
        sqlite_where=sa.text("clean = 0"),
        postgresql_where=sa.text("clean = 0"),
    ),
)

metrics = sa.Table(
    "metrics",
    metadata,
    sa.Column("trial_id", ID, sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("key", sa.String(250), primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("value", sa.Float),
    sa.Column("text", sa.String(250)),
    sa.Column("time", sa.Float, nullable=False),
    sqlite_with_rowid=False,
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("trial_id", ID, sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("uri", JsonText, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("committed_at", UtcDateTime, nullable=False),
    sa.Column("deleted_at", UtcDateTime, comment="When its files were seen to be gone; NULL while they are there."),
)

ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("attempt_id", ID, sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("unit", WORD, primary_key=True, comment="seconds or count"),
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("amount", sa.Float, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(250), nullable=False),
    sa.Column("trial_id", ID),
    sa.Column("attempt_id", ID),
    sa.Column("before", WORD),
    sa.Column("after", WORD),
    sa.Column("cause", JsonText, nullable=False),
    sa.Column("data", JsonText, nullable=False),
    sa.Index(None, "trial_id", "seq"),
)

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
    sa.Column("trial_id", ID, sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("kind", WORD, nullable=False),
    sa.Column("data", JsonText, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

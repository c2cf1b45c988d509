"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
        comment="Last number given out per sequence. A database's own sequences have gaps and commit out of order.",
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=250), nullable=False),
        sa.Column("trial_id", sa.String(length=64), nullable=True),
        sa.Column("attempt_id", sa.String(length=64), nullable=True),
        sa.Column("before", sa.String(length=32), nullable=True),
        sa.Column("after", sa.String(length=32), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_events_trial_id_seq"), ["trial_id", "seq"], unique=False)

    op.create_table(
        "experiments",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("objective", sa.Text(), nullable=True),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("trials_made", sa.Integer(), server_default="0", nullable=False),
        sa.Column("mlflow_experiment_id", sa.String(length=250), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sa.UniqueConstraint("name", name=op.f("uq_experiments_name")),
    )
    op.create_table(
        "leaders",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("counter", sa.BigInteger(), nullable=False),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leaders")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("connected", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("name", name=op.f("uq_nodes_name")),
    )
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=250), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("type", sa.String(length=100), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("uuid", sa.String(length=100), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_devices_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("node_id", "index", name=op.f("uq_devices_node_id_index")),
    )
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("experiment_id", sa.String(length=64), nullable=False),
        sa.Column("parent_id", sa.String(length=64), nullable=True),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.String(length=64), nullable=True),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("sweep", sa.Text(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("proposed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("next_run_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_sweeps_experiment_id_experiments")
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["sweeps.id"], name=op.f("fk_sweeps_parent_id_sweeps")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
        sa.UniqueConstraint("actor", "key", name=op.f("uq_sweeps_actor_key")),
    )
    with op.batch_alter_table("sweeps", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sweeps_experiment_id"), ["experiment_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_sweeps_parent_id"), ["parent_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_sweeps_state"), ["state"], unique=False)

    op.create_table(
        "proposals",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("experiment_id", sa.String(length=64), nullable=False),
        sa.Column("sweep_id", sa.String(length=64), nullable=True),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.String(length=64), nullable=True),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("trial_ids", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_proposals_experiment_id_experiments")
        ),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_proposals_sweep_id_sweeps")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_proposals")),
        sa.UniqueConstraint("actor", "key", name=op.f("uq_proposals_actor_key")),
    )
    with op.batch_alter_table("proposals", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_proposals_experiment_id"), ["experiment_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_proposals_sweep_id"), ["sweep_id"], unique=False)

    op.create_table(
        "trials",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("experiment_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("sweep_id", sa.String(length=64), nullable=True),
        sa.Column("proposal_id", sa.String(length=64), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("params", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.String(length=64), nullable=False),
        sa.Column("replicate", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("state_cause", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False, comment="Sequence of the event that made it."),
        sa.Column("priority", sa.SmallInteger(), nullable=False, comment="Index in CLASS_ORDER; 0 runs first."),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False, comment="Sequence of the event that queued it."),
        sa.Column(
            "not_before", sa.DateTime(timezone=True), nullable=True, comment="Backoff after an infrastructure fault."
        ),
        sa.Column("tracked", sa.Boolean(), nullable=False, comment="Its state is tracked: it can yield and resume."),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("phase", sa.String(length=64), nullable=True),
        sa.Column("attempts_made", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retries_used", sa.Integer(), server_default="0", nullable=False),
        sa.Column("preemptions", sa.Integer(), server_default="0", nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("mlflow_run_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_trials_experiment_id_experiments")
        ),
        sa.ForeignKeyConstraint(["proposal_id"], ["proposals.id"], name=op.f("fk_trials_proposal_id_proposals")),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_trials_sweep_id_sweeps")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint("experiment_id", "number", name=op.f("uq_trials_experiment_id_number")),
        sa.UniqueConstraint("name", name=op.f("uq_trials_name")),
        sa.UniqueConstraint("seq", name=op.f("uq_trials_seq")),
    )
    with op.batch_alter_table("trials", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_trials_experiment_id_config_hash"), ["experiment_id", "config_hash"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_trials_proposal_id"), ["proposal_id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_trials_state_priority_rank_place"), ["state", "priority", "rank", "place"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_trials_sweep_id"), ["sweep_id"], unique=False)

    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("trial_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("dir", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("exit_codes", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column(
            "exit", sa.Text(), nullable=True, comment="The exit event's data, kept until the attempt is ended from it."
        ),
        sa.Column("acked", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("directive", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_attempts_node_id_nodes")),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_attempts_trial_id_trials")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("trial_id", "number", name=op.f("uq_attempts_trial_id_number")),
    )
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.create_index(
            "ix_attempts_live",
            ["node_id"],
            unique=False,
            sqlite_where=sa.text("ended_at IS NULL"),
            postgresql_where=sa.text("ended_at IS NULL"),
        )

    op.create_table(
        "checkpoints",
        sa.Column("trial_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_checkpoints_trial_id_trials")),
        sa.PrimaryKeyConstraint("trial_id", "attempt", "generation", "step", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "generations",
        sa.Column("trial_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column(
            "fork_step",
            sa.BigInteger(),
            nullable=True,
            comment="Step of the checkpoint that it restored; 0 is from scratch.",
        ),
        sa.Column("first_step", sa.BigInteger(), nullable=True, comment="The lowest step that it logged."),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_generations_trial_id_trials")),
        sa.PrimaryKeyConstraint("trial_id", "attempt", "generation", name=op.f("pk_generations")),
    )
    op.create_table(
        "metrics",
        sa.Column("trial_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=250), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("text", sa.String(length=250), nullable=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_metrics_trial_id_trials")),
        sa.PrimaryKeyConstraint("trial_id", "key", "step", "attempt", "generation", name=op.f("pk_metrics")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "outbox",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("trial_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_outbox_trial_id_trials")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_outbox")),
    )
    op.create_table(
        "leases",
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("heartbeat", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("clean_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_leases_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_leases")),
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index(
            "ix_leases_unclean",
            ["state"],
            unique=False,
            sqlite_where=sa.text("state <> 'clean'"),
            postgresql_where=sa.text("state <> 'clean'"),
        )

    op.create_table(
        "ledger",
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("unit", sa.String(length=32), nullable=False, comment="seconds or count"),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("amount", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_ledger_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("attempt_id", "unit", "name", name=op.f("pk_ledger")),
    )
    op.create_table(
        "lease_devices",
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("device_id", sa.String(length=250), nullable=False),
        sa.Column("clean", sa.SmallInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["leases.attempt_id"], name=op.f("fk_lease_devices_attempt_id_leases")),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_lease_devices_device_id_devices")),
        sa.PrimaryKeyConstraint("attempt_id", "device_id", name=op.f("pk_lease_devices")),
    )
    with op.batch_alter_table("lease_devices", schema=None) as batch_op:
        batch_op.create_index(
            "uq_lease_devices_live",
            ["device_id"],
            unique=True,
            sqlite_where=sa.text("clean = 0"),
            postgresql_where=sa.text("clean = 0"),
        )

    op.bulk_insert(
        sa.table("counters", sa.column("name", sa.String()), sa.column("value", sa.BigInteger())),
        [{"name": "event", "value": 0}, {"name": "outbox", "value": 0}],
    )


def downgrade() -> None:
    with op.batch_alter_table("lease_devices", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_lease_devices_live", sqlite_where=sa.text("clean = 0"), postgresql_where=sa.text("clean = 0")
        )

    op.drop_table("lease_devices")
    op.drop_table("ledger")
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_leases_unclean", sqlite_where=sa.text("state <> 'clean'"), postgresql_where=sa.text("state <> 'clean'")
        )

    op.drop_table("leases")
    op.drop_table("outbox")
    op.drop_table("metrics")
    op.drop_table("generations")
    op.drop_table("checkpoints")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_attempts_live", sqlite_where=sa.text("ended_at IS NULL"), postgresql_where=sa.text("ended_at IS NULL")
        )

    op.drop_table("attempts")
    with op.batch_alter_table("trials", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_trials_sweep_id"))
        batch_op.drop_index(batch_op.f("ix_trials_state_priority_rank_place"))
        batch_op.drop_index(batch_op.f("ix_trials_proposal_id"))
        batch_op.drop_index(batch_op.f("ix_trials_experiment_id_config_hash"))

    op.drop_table("trials")
    with op.batch_alter_table("proposals", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_proposals_sweep_id"))
        batch_op.drop_index(batch_op.f("ix_proposals_experiment_id"))

    op.drop_table("proposals")
    with op.batch_alter_table("sweeps", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sweeps_state"))
        batch_op.drop_index(batch_op.f("ix_sweeps_parent_id"))
        batch_op.drop_index(batch_op.f("ix_sweeps_experiment_id"))

    op.drop_table("sweeps")
    op.drop_table("devices")
    op.drop_table("nodes")
    op.drop_table("leaders")
    op.drop_table("experiments")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_events_trial_id_seq"))

    op.drop_table("events")
    op.drop_table("counters")

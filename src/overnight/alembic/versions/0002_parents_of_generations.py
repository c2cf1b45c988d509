"""From whose checkpoint a start of the ranks went on; unknown for those that are there."""

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column(
                "parent_attempt",
                sa.Integer(),
                nullable=True,
                comment="Whose checkpoint that was; 0 is nobody's, NULL not told.",
            )
        )
        batch_op.add_column(sa.Column("parent_generation", sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.drop_column("parent_generation")
        batch_op.drop_column("parent_attempt")

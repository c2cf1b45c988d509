"""Migrations of the store's schema, shipped with the package. The alembic library itself is ``import alembic``."""

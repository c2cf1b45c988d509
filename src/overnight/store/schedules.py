"""Where APScheduler keeps when each schedule fires next, so that a restart forgets nothing."""

import warnings
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore

BUSY_SECONDS = 30.0


def job_store(store_url: str) -> Any:
    """APScheduler's persistent job store for the store of this URL.

    On SQLite it is a file beside the database: two writers of one SQLite file would wait for each other. On PostgreSQL
    it is the table ``apscheduler_jobs`` in the same database.
    """
    url = sa.make_url(store_url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        url = url.set(database=str(Path(str(url.database)).with_name("schedules.db")))
        options = {"connect_args": {"timeout": BUSY_SECONDS}}
    elif url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return SQLAlchemyJobStore(engine=sa.create_engine(url, **options))

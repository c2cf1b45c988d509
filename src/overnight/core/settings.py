"""One frozen settings object, built once by the command line from the environment and ``overnight.toml``."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from overnight.core.errors import InvalidSpecError
from overnight.core.paths import Home
from overnight.core.sizes import parse_bytes

PREFIX = "OVERNIGHT_"


class Settings(BaseModel):
    """How this installation behaves. Every field can be set as ``OVERNIGHT_<NAME>`` or in ``<home>/overnight.toml``.

    Attributes:
        home: Where everything lives.
        store_url: SQLAlchemy URL; SQLite in the home if None.
        mlflow_uri: MLflow tracking URI; SQLite in the home if None.
        host, port: Where the server listens; port 0 takes any free one.
        pool: ``nvml[:0-3,7]``, ``cpu:N`` or ``fake:N``; NVML if it finds GPUs, else CPU slots, if None.
        grace_seconds: From a yield to SIGTERM.
        heartbeat_seconds, lease_seconds: See docs/architecture.md, "Leases".
        probe_seconds: Between two looks at a device.
        checkpoint_quota: What an experiment's checkpoints may have together, such as ``"50GB"``, unless its spec says;
            no limit if None.
        janitor_seconds: Between two looks at quotas and at what could not be tidied before.
        token: Bearer token for clients; read from the token file if None.
        server: URL of the server for clients; read from ``server.json`` if None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path
    store_url: str | None = None
    mlflow_uri: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    pool: str | None = None
    grace_seconds: float = Field(default=30.0, gt=0)
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    lease_seconds: float = Field(default=30.0, gt=0)
    probe_seconds: float = Field(default=5.0, gt=0)
    checkpoint_quota: str | None = None
    janitor_seconds: float = Field(default=300.0, gt=0)
    token: str | None = Field(default=None, repr=False)
    server: str | None = None

    @field_validator("checkpoint_quota")
    @classmethod
    def _quota(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value

    @property
    def checkpoint_quota_bytes(self) -> int | None:
        """The quota in bytes."""
        return parse_bytes(self.checkpoint_quota) if self.checkpoint_quota is not None else None

    @property
    def paths(self) -> Home:
        """The layout of the home."""
        return Home(self.home)

    @property
    def effective_store_url(self) -> str:
        """The database's URL with the default filled in."""
        return self.store_url or f"sqlite:///{self.home / 'overnight.db'}"

    @property
    def effective_mlflow_uri(self) -> str:
        """MLflow's tracking URI with the default filled in."""
        return self.mlflow_uri or f"sqlite:///{self.home / 'mlflow.db'}"


def build_settings(env: Mapping[str, str], toml_text: str = "", **overrides: Any) -> Settings:
    """Settings from, in rising precedence: defaults, the TOML text, the environment, ``overrides`` that are not None.

    Only ``OVERNIGHT_`` names that are fields count. Others belong to trials (``OVERNIGHT_TRIAL_ID`` …) unless they look
    like a mistyped field.

    Raises:
        InvalidSpecError: A value does not validate, a name is mistyped or no setting; the message names it.
    """
    values: dict[str, Any] = {"home": Path(env.get("HOME", "~")).expanduser() / ".overnight"}
    try:
        values.update(tomllib.loads(toml_text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidSpecError(
            f"overnight.toml is not TOML: {error}", hint='Write lines such as pool = "cpu:4".'
        ) from None
    _refuse_mistyped(env, values)
    for name in Settings.model_fields:
        if (text := env.get(PREFIX + name.upper())) not in (None, ""):
            values[name] = text
    values.update({k: v for k, v in overrides.items() if v is not None})
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidSpecError(
            f"setting {name!r}: {first['msg']} (got {first.get('input')!r})",
            hint=f"Set {PREFIX}{name.upper()} or {name} in overnight.toml.",
        ) from None
    if settings.pool is not None and not re.fullmatch(r"nvml(:[0-9,-]+)?|(cpu|fake):[0-9]+", settings.pool):
        raise InvalidSpecError(f"pool {settings.pool!r} is none", hint="Use nvml, nvml:0-3,7, cpu:N or fake:N.")
    return settings.model_copy(update={"home": settings.home.expanduser().absolute()})


def _refuse_mistyped(env: Mapping[str, str], from_toml: Mapping[str, Any]) -> None:
    for name in from_toml.keys() - Settings.model_fields.keys():
        close = _closest(name, 0.6)
        known = f"Did you mean {close!r}?" if close else f"Known are: {', '.join(Settings.model_fields)}."
        raise InvalidSpecError(f"overnight.toml: there is no setting {name!r}", hint=known)
    for variable in env:
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in Settings.model_fields and (close := _closest(name, 0.8)):
            raise InvalidSpecError(f"{variable} is no setting", hint=f"Did you mean {PREFIX}{close.upper()}?")


def _closest(name: str, cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=cutoff)), None)

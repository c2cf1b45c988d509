"""The base of every wire model: strict about unknown keys, frozen, finite numbers only."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """A value that crosses a process boundary. Unknown keys are errors: a typo must not pass silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

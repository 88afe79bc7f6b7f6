"""The base of every table of the manifest."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every table: it refuses unknown keys, is immutable, and guesses no type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

"""The use of an accelerator, as a trainer reports it."""

from pydantic import BaseModel, ConfigDict, Field


class DeviceUse(BaseModel):
    """The use of an accelerator by all programs; memory in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float | None = Field(default=None, ge=0, le=1, description="of the time; None: the driver does not say")
    memory: int = Field(ge=0)
    memory_total: int = Field(ge=0)

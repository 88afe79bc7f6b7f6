"""The scaling of rotary positions with which a model reads longer texts than it began with.

The keys have the names of `rope_parameters` in a config.json of Hugging Face.
"""

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from protocol.manifest.base import Section

OWN_KEYS: Final = {
    "linear": ((), ()),
    "llama3": (("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("original_max_position_embeddings",), ("beta_fast", "beta_slow", "attention_factor", "truncate")),
}  # needed and optional keys besides rope_type and factor


class RopeScaling(Section):
    """How the frequencies of rotary positions change: all (`linear`), or the slow ones (`llama3`, `yarn`)."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float = Field(ge=1, le=1e4, description="by which the slow frequencies are divided")
    original_max_position_embeddings: int | None = Field(default=None, ge=2, le=2**24)
    low_freq_factor: float | None = Field(default=None, gt=0, le=1e4)
    high_freq_factor: float | None = Field(default=None, gt=0, le=1e4)
    beta_fast: float | None = Field(default=None, gt=0, le=1e4)
    beta_slow: float | None = Field(default=None, gt=0, le=1e4)
    attention_factor: float | None = Field(default=None, gt=0, le=1e4)
    truncate: bool | None = None

    @model_validator(mode="after")
    def _has_the_keys_of_its_type(self) -> Self:
        needed, optional = OWN_KEYS[self.rope_type]
        given = set(self.model_dump(exclude_none=True)) - {"rope_type", "factor"}
        if missing := [key for key in needed if key not in given]:
            raise ValueError(f"rope_type {self.rope_type} needs {missing[0]}; add it")
        if unused := sorted(given - {*needed, *optional}):
            raise ValueError(f"rope_type {self.rope_type} has no {unused[0]}; remove it")
        if (self.low_freq_factor or 0) >= (self.high_freq_factor or 1e9):
            raise ValueError("low_freq_factor must be below high_freq_factor")
        if (self.beta_slow or 1) >= (self.beta_fast or 32):
            raise ValueError("beta_slow must be below beta_fast")
        return self

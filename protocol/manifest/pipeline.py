"""The table [pipeline] of the manifest: how many stages, and how microbatches travel through them."""

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field, field_validator

from protocol.manifest.base import Section
from protocol.manifest.data import SourceSection

MAX_STAGES: Final = 128
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 2**20, 2**40
Activations = Literal["fp32", "bf16", "int8"]
ACTIVATION_BYTES: Final = {"fp32": 4, "bf16": 2, "int8": 1}  # of one value
INT8_BLOCK, INT8_SCALE_BYTES, INT8_HEADER_BYTES = 256, 2, 2  # those of the codec int8
MAX_STEP_MICROBATCHES: Final = 4096  # of an exact step: its ledger has half a kibibyte
MIN_HELD_ACTIVATIONS = 8  # a forward and a backward pass, each with its input and output, of two owners


class PipelineSection(Section):
    """Stages of the model on different peers; with one stage, every peer trains the whole model."""

    stages: int = Field(default=1, ge=1, le=MAX_STAGES, description="stages that the model is cut into")
    microbatch: int = Field(default=8, ge=1, le=4096, description="sequences that travel together")
    in_flight: int = Field(default=64, ge=1, le=4096, description="microbatches of one owner on their way")
    activations: Activations = Field(default="bf16", description="format of travelling activations")
    mode: Literal["local", "exact"] = Field(
        default="local", description="a sample counts at most once at each stage, or exactly once"
    )
    staleness: int = Field(default=0, ge=0, le=64, description="steps that may pass between forward and backward")
    memory: int = Field(
        default=2**28, ge=MIN_MEMORY_BYTES, le=MAX_MEMORY_BYTES, description="bytes of activations that a peer holds"
    )

    @field_validator("staleness")
    @classmethod
    def _waits_for_backward(cls, staleness: int) -> int:
        if staleness:
            raise ValueError("steps while microbatches are on their way are not available yet; write 0")
        return staleness

    @property
    def is_cut(self) -> bool:
        """Return whether peers serve stages of the model."""
        return self.stages > 1

    def activation_bytes(self, context: int, width: int) -> int:
        """Return the bytes of one activation of a microbatch on its way."""
        values = self.microbatch * context * width
        blocks = -(-values // INT8_BLOCK) if self.activations == "int8" else 0
        scales = INT8_HEADER_BYTES + INT8_SCALE_BYTES * blocks if blocks else 0
        return values * ACTIVATION_BYTES[self.activations] + scales

    @property
    def is_exact(self) -> bool:
        """Return whether a sample counts exactly once at each stage."""
        return self.mode == "exact"

    def step_microbatches(self, batch_tokens: int, context: int) -> int:
        """Return the number of microbatches in a step of `batch_tokens`."""
        return batch_tokens // (self.microbatch * context)

    def require_exact_fit(self, sources: Sequence[SourceSection], batch_tokens: int, context: int) -> None:
        """Raise ValueError unless the rest of the manifest allows exact steps, if it wants any."""
        if not self.is_exact:
            return
        if not self.is_cut:
            raise ValueError('pipeline.mode: exact steps need several stages; write stages = 2, or mode = "local"')
        streamed = next((entry for entry in sources if entry.source == "hf"), None)
        if streamed is not None:
            raise ValueError(
                f'{streamed.key}.source: exact steps read the text by number, which "hf" cannot; '
                'write "tokens", "text" or "python-stdlib", or pipeline.mode = "local"'
            )
        if self.step_microbatches(batch_tokens, context) > MAX_STEP_MICROBATCHES:
            most = MAX_STEP_MICROBATCHES * self.microbatch * context
            raise ValueError(f"train.batch_tokens: an exact step has at most {most} tokens here; write fewer")

    def require_fit(self, batch_tokens: int, context: int, width: int) -> None:
        """Raise ValueError unless microbatches make up a step, and enough of them fit into the memory."""
        if not self.is_cut:
            return
        if batch_tokens % (self.microbatch * context):
            raise ValueError("train.batch_tokens must be a multiple of pipeline.microbatch times model.context")
        needed = MIN_HELD_ACTIVATIONS * self.activation_bytes(context, width)
        if self.memory < needed:
            raise ValueError(f"pipeline.memory must hold {MIN_HELD_ACTIVATIONS} activations; write at least {needed}")

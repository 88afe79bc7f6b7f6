"""The table [model] of the manifest: the language model, and the weights with which it starts.

A line of text describes each tensor of an organiser's own model, with name, shape and first values:

    features.0.weight 16x3x3x3 normal 0.1
    features.0.bias 16 zeros
    scale scalar ones
    logit_scale scalar constant 2.66

No code travels with a run. A model that starts from weights (`model.from`) needs no first values.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from protocol.manifest.sections import AdapterSection, Name, Section

OWN_KEYS: Final = {
    "linear": ((), ()),
    "llama3": (("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("original_max_position_embeddings",), ("beta_fast", "beta_slow", "attention_factor", "truncate")),
}  # needed and optional keys besides rope_type and factor
CUSTOM_KIND: Final = "custom"
MAX_TENSORS: Final = 1026  # as many as another model may have blocks
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 2**40
SCALAR: Final = "scalar"
LINE: Final = re.compile(
    r"(?P<name>[!-~]{1,200}) (?P<shape>scalar|[1-9]\d{0,11}(x[1-9]\d{0,11}){0,7})"
    r"( (?P<first>zeros|ones|normal (?P<deviation>\d{1,6}(\.\d{1,12})?(e-?\d{1,2})?)"
    r"|constant (?P<constant>-?\d{1,6}(\.\d{1,12})?(e-?\d{1,2})?)))?",
    re.ASCII,
)
HUB_SCHEME: Final = "hf:"
ADVICE: Final = (
    "write NAME SHAPE and zeros, ones, constant VALUE or normal DEVIATION, such as 'layer.weight 64x32 normal 0.02'"
)
DEFAULT_MODEL_KIND = "llama"
DEFAULT_NORM_EPSILON = 1e-5
DEFAULT_BALANCE_LOSS = 1e-3
MAX_LAYERS = 1024
MAX_EXPERTS_OF_ALL_LAYERS = 2**16  # each is three tensors, whose names every node lists
MAX_BLOCKS = MAX_LAYERS + 2  # embedding and head
CUSTOM_KEYS: Final = frozenset({"kind", "tensors", "from", "from_", "weights"})
UNUSED_SIZES: Final = {"width": 8, "layers": 1, "heads": 1, "hidden": 8, "context": 2, "tied": False}  # of custom ones
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


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


@dataclass(frozen=True)
class TensorLine:
    """A parameter: its name, its shape, and mean and standard deviation of its first values if the line has any."""

    name: str
    shape: tuple[int, ...]
    first: tuple[float, float] | None


def parse_tensor(text: str) -> TensorLine:
    """Parse a line. Raises ValueError, which says what to write."""
    found = LINE.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:80]!r} is not a tensor; {ADVICE}")
    shape = () if found["shape"] == SCALAR else tuple(map(int, found["shape"].split("x")))
    if found["first"] is None:
        return TensorLine(found["name"], shape, None)
    if found["constant"] is not None:
        return TensorLine(found["name"], shape, (float(found["constant"]), 0.0))
    if found["deviation"] is None:
        return TensorLine(found["name"], shape, (float(found["first"] == "ones"), 0.0))
    return TensorLine(found["name"], shape, (0.0, float(found["deviation"])))


def format_tensor(name: str, shape: Iterable[int], first: str = "") -> str:
    """Return the line of a parameter."""
    return " ".join(filter(None, (name, "x".join(map(str, shape)) or SCALAR, first)))


def _check_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    tensors = [parse_tensor(line) for line in lines]
    names = [tensor.name for tensor in tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise ValueError(f"{twice[0]} is defined twice; remove one")
    if sum(math.prod(tensor.shape) for tensor in tensors) > MAX_ELEMENTS:
        raise ValueError(f"the tensors have more than {MAX_ELEMENTS} elements; use a smaller model")
    return lines


TensorLines = Annotated[tuple[str, ...], Field(max_length=MAX_TENSORS), AfterValidator(_check_lines)]


class ModelSection(Section):
    """The language model, and the weights with which it starts. Sizes in elements."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    kind: Name = Field(default=DEFAULT_MODEL_KIND, description="family of models; the node knows which exist")
    vocabulary: int = Field(default=256, ge=2, le=2**20)
    width: int = Field(ge=8, le=2**16)
    layers: int = Field(ge=1, le=MAX_LAYERS)
    heads: int = Field(ge=1, le=1024)
    kv_heads: int | None = Field(default=None, ge=1, description="heads of keys and values; absent: as many as heads")
    head_size: int | None = Field(default=None, ge=2, le=2**12, description="width of a head; absent: width / heads")
    hidden: int = Field(ge=8, le=2**18)
    context: int = Field(ge=2, le=2**20)
    tied: bool = Field(default=True, description="the output layer shares the embedding's weights")
    rope_theta: float = Field(default=10_000.0, ge=1, le=1e12)
    rope_scaling: RopeScaling | None = Field(default=None, description="of rotary positions, for long contexts")
    subspace: int | None = Field(default=None, ge=8, description="values of a token in the residual stream")
    norm_epsilon: float = Field(default=DEFAULT_NORM_EPSILON, gt=0, le=1, description="added in the norms")
    experts: int | None = Field(default=None, ge=2, le=1024, description="MLPs of a layer; absent: one for all tokens")
    experts_per_token: int | None = Field(default=None, ge=1, le=64, description="experts that a token goes to")
    normalize_experts: bool = Field(default=True, description="the weights of a token's experts have the sum 1")
    balance_loss: float = Field(default=DEFAULT_BALANCE_LOSS, ge=0, le=10, description="weight of the balance loss")
    document_end: int | None = Field(
        default=None, ge=0, description="token that ends a document, across which no token sees another"
    )
    tensors: TensorLines = Field(default=(), description="custom only: name, shape and first values of each parameter")
    from_: str = Field(
        default="", alias="from", max_length=4096, description="where this machine finds the weights; empty: peers"
    )
    weights: tuple[Sha256, ...] = Field(
        default=(), max_length=MAX_BLOCKS, description="hash of each block's first weights; empty: drawn by run.seed"
    )
    _adapter: AdapterSection | None = PrivateAttr(default=None)  # the manifest's table [adapter]

    @model_validator(mode="before")
    @classmethod
    def _own_tensors_have_no_sizes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # pydantic forgets that the values come from JSON, which has no tuples
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        if values.get("kind") != CUSTOM_KIND:
            return values
        if more := [key for key in values if key in cls.model_fields and key not in CUSTOM_KEYS]:
            raise ValueError(f"{more[0]} belongs to other kinds of models than custom; remove it")
        return UNUSED_SIZES | values

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key in CUSTOM_KEYS} if self.is_custom else values

    @model_validator(mode="after")
    def _own_tensors_are_given(self) -> Self:
        if self.is_custom != bool(self.tensors):
            raise ValueError('tensors must be given with kind = "custom", and only then')
        if not self.weights:
            without = next((line for line in self.tensors if parse_tensor(line).first is None), None)
            if without is not None:
                raise ValueError(
                    f"tensors must have first values: append zeros, ones or normal 0.02 to {without[:80]!r}"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_named(self) -> Self:
        if self.from_ and not self.weights:
            raise ValueError("from needs weights, which `murmur up`, `host` and `join` write when they read the folder")
        if self.is_custom and self.weights and len(self.weights) != len(self.tensors):
            raise ValueError("weights must have a hash for each of the tensors")
        if not self.is_custom and self.weights and len(self.weights) != self.layers + 2:
            raise ValueError("weights must have a hash for the embedding, each layer and the head")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_size is None and (self.width % self.heads or self.head_width % 2):
            raise ValueError("width must be an even multiple of heads; or give head_size")
        if self.head_width % 2:
            raise ValueError("head_size must be even")
        if self.heads % self.key_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self

    @model_validator(mode="after")
    def _rope_turns_at_several_speeds(self) -> Self:
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError("rope_theta must be above 1 with rope_scaling of the type yarn")
        return self

    @model_validator(mode="after")
    def _subspace_is_smaller(self) -> Self:
        if self.subspace is not None and self.subspace >= self.width:
            raise ValueError("subspace must be below width")
        if self.subspace is not None and self.tied:
            raise ValueError("subspace needs tied = false, because its embedding has a fixed part; write that")
        if self.subspace is not None and (self.from_ or self.weights):
            raise ValueError(
                "subspace cannot be combined with model.from: pretrained weights are in no subspace; remove one"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_counted(self) -> Self:
        if (self.experts is None) != (self.experts_per_token is None):
            raise ValueError("experts and experts_per_token go together; give both, or none")
        if (self.experts_per_token or 0) > (self.experts or 0):
            raise ValueError("experts_per_token must be at most experts")
        if self.layers * (self.experts or 0) > MAX_EXPERTS_OF_ALL_LAYERS:
            raise ValueError(f"experts of all layers together must be at most {MAX_EXPERTS_OF_ALL_LAYERS}")
        return self

    @model_validator(mode="after")
    def _document_end_is_a_token(self) -> Self:
        if self.document_end is not None and self.document_end >= self.vocabulary:
            raise ValueError("document_end must be below vocabulary")
        return self

    @property
    def adapter(self) -> AdapterSection | None:
        """Return the adapter that is trained in the place of the weights, which are frozen then."""
        return self._adapter

    def with_adapter(self, adapter: AdapterSection | None) -> Self:
        """Return the same model with another adapter, or without one."""
        model = self.model_copy()
        model._adapter = adapter
        return model

    @property
    def is_custom(self) -> bool:
        """Return whether the model is the organiser's own, which only loops of the users can compute."""
        return self.kind == CUSTOM_KIND

    @property
    def stream_width(self) -> int:
        """Return the values of a token in the residual stream that travel between stages."""
        return self.subspace or self.width

    @property
    def needs_tokens(self) -> bool:
        """Return whether each stage needs the token ids, and not only the first and the last."""
        return self.subspace is not None

    @property
    def head_width(self) -> int:
        """Return the width of a head of attention."""
        return self.head_size or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.kv_heads or self.heads

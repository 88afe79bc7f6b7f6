"""The table [data] of the manifest: the sources of text, and the shares in which peers draw from them."""

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from protocol.manifest.base import Name, Section

MAX_SOURCES: Final = 16
NUMBER_BITS: Final = 64  # of a window, in the position of a peer in the text
PLACE_BITS: Final = 128  # of each source above them
MAX_PHASES: Final = 16
MAX_WEIGHT: Final = 1e6
SourceKind = Literal["python-stdlib", "text", "tokens", "hf"]
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]


class SourceSection(Section):
    """One source of text. The only source of a run may have no name."""

    name: Name = Field(default="", description="name of the source in messages and figures")
    source: SourceKind
    path: str = Field(default="", description="glob, shard folder or data set name; relative to the manifest")
    split: str = Field(default="train", description="hf only")
    column: str = Field(default="text", description="hf only: the column that holds the text")
    weight: Weight = Field(default=1.0, description="of the windows that a peer draws, relative to other sources")

    @property
    def key(self) -> str:
        """Return the name of the table in a manifest, for errors."""
        return f"data.sources.{self.name}" if self.name else "data"


def _require_some_weight(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        raise ValueError("give one source a weight above 0")
    return weights


SourceWeights = Annotated[dict[Name, Weight], Field(max_length=MAX_SOURCES), AfterValidator(_require_some_weight)]


class PhaseSection(Section):
    """Weights that hold from a share of the run, or a number of its tokens, on."""

    share: float | None = Field(default=None, gt=0, lt=1, description="of the target, from which the weights hold")
    tokens: int | None = Field(default=None, ge=1, description="of the run, from which the weights hold")
    weights: SourceWeights = Field(description="of the sources, by name")

    def has_begun(self, progress: float, tokens: int) -> bool:
        """Return whether the phase has begun in a run with so many tokens, which has come so far from 0 to 1."""
        return tokens >= self.tokens if self.tokens is not None else progress >= (self.share or 0.0)


class DataSection(Section):
    """The sources of the tokens: one, or a mixture of several."""

    source: Literal[SourceKind, "own"] | None = Field(
        default=None, description="the only source; absent: those of data.sources"
    )
    path: str = Field(default="", description="glob, shard folder or data set name; relative to the manifest")
    split: str = Field(default="train", description="hf only")
    column: str = Field(default="text", description="hf only: the column that holds the text")
    tokenizer: str = Field(default="", description="tokenizer.json of all sources; empty: bytes")
    validation_share: float = Field(default=0.02, gt=0, lt=0.5)
    sources: tuple[SourceSection, ...] = Field(default=(), max_length=MAX_SOURCES, description="sources of a mixture")
    phases: tuple[PhaseSection, ...] = Field(
        default=(), max_length=MAX_PHASES, description="weights of later parts of the run"
    )
    weights: SourceWeights | None = Field(
        default=None, description="weights by name, in place of those of sources and phases"
    )

    @model_validator(mode="after")
    def _has_sources(self) -> Self:
        if self.source is None and not self.sources:
            raise ValueError('source is missing; add it, such as source = "text", or tables [[data.sources]]')
        if self.sources and (self.source is not None or self.path):
            key = "path" if self.source is None else "source"
            raise ValueError(f"{key} excludes the tables [[data.sources]]; make one of them of it")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [entry.name for entry in self.sources]
        if "" in names:
            raise ValueError(f"sources.{names.index('')}.name is missing; add it")
        twice = next((number for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise ValueError(f"sources.{twice}.name is that of another source; choose another name")
        if self.sources and not any(self.first_weights):
            raise ValueError("sources.0.weight is 0 as all others are; give one source a weight above 0")
        return self

    @model_validator(mode="after")
    def _phases_are_complete(self) -> Self:
        names = [entry.name for entry in self.sources]
        for number, phase in enumerate(self.phases):
            if (phase.share is None) == (phase.tokens is None):
                raise ValueError(f"phases.{number} has share or tokens, which say when it begins; give one of them")
            if sorted(phase.weights) != sorted(names):
                known = ", ".join(names) or "there are none in data.sources"
                raise ValueError(f"phases.{number}.weights must name each source: {known}")
        return self

    @property
    def mixture(self) -> tuple[SourceSection, ...]:
        """Return the sources; a single one is a mixture of one. Where each peer brings its own data there are none."""
        if self.source is None or self.source == "own":
            return self.sources
        return (SourceSection(source=self.source, path=self.path, split=self.split, column=self.column),)

    @property
    def first_weights(self) -> tuple[float, ...]:
        """Return the weights with which the run begins, in the order of the sources."""
        return tuple(entry.weight for entry in self.mixture)

    def weights_at(self, progress: float, tokens: int) -> tuple[float, ...]:
        """Return the weights of a run with so many tokens, which has come so far from 0 to 1.

        A revision of other names than those of the sources, which no tool of ours makes, changes nothing.
        """
        names = [entry.name for entry in self.mixture]
        begun = [phase.weights for phase in self.phases if phase.has_begun(progress, tokens)]
        revised = [] if self.weights is None or sorted(self.weights) != sorted(names) else [self.weights]
        named = [*begun, *revised]
        return tuple(named[-1][name] for name in names) if named else self.first_weights

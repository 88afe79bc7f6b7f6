"""The tables of the manifest except [model], each with the types and checks of its values."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from protocol.errors import MalformedError
from protocol.fault_words import shorten
from protocol.identity import public_key

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]
Scalar = bool | int | float | str
ScalarTable = dict[str, Scalar]
OptionValue = Scalar | ScalarTable | tuple[Scalar | ScalarTable, ...]
MAX_OPTION_PHASES = 64
MAX_OPTION_KEYS = 8
DEFAULT_KEEPERS = 1
MemoryMode = Literal["normal", "small"]
MAX_ROUNDS = 2**24  # a round every half minute for sixteen years; a message of a later one is refused
MAX_TOKENS = 2**60
MAX_STEPS = 2**40
LEAST_RATE_FACTOR = 1e-6  # a learning rate is above zero
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.5, 3600.0
Timeout = Annotated[float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS)]
MIN_HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS = 0.2, 300.0
HEARTBEATS_UNTIL_EXPIRY = 4  # at least, so that a lost message does not make a peer count as gone
MAX_BATCH_TOKENS = 2**24  # of one inner step: hours on a small machine
MAX_KEPT_CHECKPOINTS = 100
MAX_SOURCES: Final = 16
NUMBER_BITS: Final = 64  # of a window, in the position of a peer in the text
PLACE_BITS: Final = 128  # of each source above them
MAX_PHASES: Final = 16
MAX_WEIGHT: Final = 1e6
MAX_TEMPLATE_CHARACTERS: Final = 2**15
SourceKind = Literal["python-stdlib", "text", "tokens", "hf", "questions"]
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
MAX_STAGES: Final = 128
MAX_STAGE_SPEED: Final = 1e4  # of the fastest stage, where the slowest has 1
StageSpeed = Annotated[float, Field(ge=1, le=MAX_STAGE_SPEED)]
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 2**20, 2**40
Activations = Literal["fp32", "bf16", "int8"]
ACTIVATION_BYTES: Final = {"fp32": 4, "bf16": 2, "int8": 1}  # of one value
INT8_BLOCK, INT8_SCALE_BYTES, INT8_HEADER_BYTES = 256, 2, 2  # those of the codec int8
MAX_STEP_MICROBATCHES: Final = 4096  # of an exact step: its ledger has half a kibibyte
MIN_HELD_ACTIVATIONS = 8  # a forward and a backward pass, each with its input and output, of two owners


class Section(BaseModel):
    """Base of every table: it refuses unknown keys, is immutable, and guesses no type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_peer_ids(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        check_peer_id(key, "write peer ids, of 52 characters that begin with 12D3KooW")
    if len(set(keys)) < len(keys):
        raise ValueError("name each peer id once")
    return keys


def check_peer_id(key: str, advice: str) -> None:
    """Raise ValueError with this advice unless a text is a peer id."""
    try:
        public_key(key)
    except MalformedError as error:
        raise ValueError(advice) from error


PeerIds = Annotated[tuple[str, ...], Field(max_length=1024), AfterValidator(_check_peer_ids)]


def _check_option(value: object) -> OptionValue:
    """Check the shape of an option, not its meaning.

    It is a plain value, a table of these, or a list of both.
    """
    if not isinstance(value, list | tuple):
        return _check_table_or_scalar(value)
    if not 2 <= len(value) <= MAX_OPTION_PHASES:
        raise ValueError(f"a list has 2 to {MAX_OPTION_PHASES} phases")
    return tuple(_check_table_or_scalar(phase) for phase in value)


def _check_table_or_scalar(value: object) -> Scalar | ScalarTable:
    if not isinstance(value, dict):
        return _check_scalar(value)
    if len(value) > MAX_OPTION_KEYS:
        raise ValueError(f"the table of an option has at most {MAX_OPTION_KEYS} keys")
    return {str(key): _check_scalar(scalar) for key, scalar in value.items()}


def _check_scalar(value: object) -> Scalar:
    if not isinstance(value, Scalar):
        raise ValueError("write a plain value, a table of plain values, or a list of phases")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


OptionTable = dict[str, Annotated[OptionValue, BeforeValidator(_check_option)]]
MAX_MODULES: Final = 8
MAX_MODULE_CHARACTERS: Final = 200
MODULE_PATTERN: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)* [0-9a-f]{64}", re.ASCII)


def _check_module(line: str) -> str:
    if len(line) > MAX_MODULE_CHARACTERS or not MODULE_PATTERN.fullmatch(line):
        raise ValueError("write the name of a Python module and the SHA-256 of its source, as `--import` does")
    return line


ADDRESS_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")


class RunSection(Section):
    """The name of the run, its seed, and the peers to ask first."""

    name: Name
    seed: int = Field(default=0, ge=0, lt=2**63)
    min_peers: int = Field(default=1, ge=1, le=10_000, description="peers that must be present before round 0")
    bootstrap: tuple[str, ...] = Field(default=(), description="multiaddresses with /p2p/ of peers to ask first")
    organiser_key: str = Field(default="", description="peer id of the key that may steer the run; empty: nobody may")

    @field_validator("bootstrap")
    @classmethod
    def _name_their_peers(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            try:
                public_key(address.rpartition("/p2p/")[2])
            except MalformedError as error:
                raise ValueError(f"{shorten(address)} does not end in /p2p/ and a peer id; append them") from error
            if address.split("/")[1] not in ADDRESS_KINDS:
                raise ValueError(
                    f"{shorten(address)} is not the address of a machine; begin it with /ip4/, /ip6/ or /dns/"
                )
        return addresses

    @field_validator("organiser_key")
    @classmethod
    def _is_peer_id(cls, key: str) -> str:
        if key:
            check_peer_id(key, "write the organiser's peer id, 52 characters that begin with 12D3KooW")
        return key


AboutText = Annotated[str, StringConstraints(max_length=1000)]


class AboutSection(Section):
    """Facts about the run for people; they do not change what is trained."""

    description: AboutText = Field(default="", description="what the run is for")
    organiser: AboutText = Field(default="", description="name of the person or group behind the run")
    data: AboutText = Field(default="", description="a sentence about the training text")
    licence: AboutText = Field(default="", description="licence of the model, such as Apache-2.0")
    url: AboutText = Field(default="", description="page with more about the run: http:// or https://")

    @field_validator("*")
    @classmethod
    def _is_one_line(cls, text: str) -> str:
        if not text.isprintable():
            raise ValueError("write one line of text without control characters")
        return text

    @field_validator("url")
    @classmethod
    def _is_web_address(cls, url: str) -> str:
        if url and not re.match(r"^https?://[^\s/]+(/\S*)?$", url):
            raise ValueError("write an address that begins with https:// or http://")
        return url


ADAPTED: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Adapted = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FrozenType = Literal["fp32", "bf16", "int8", "nf4"]


class AdapterSection(Section):
    """Small matrices that are trained in the place of the model's weights, which are frozen."""

    kind: Literal["lora"] = Field(default="lora", description="W x + alpha / rank B A x")
    rank: int = Field(default=16, ge=1, le=1024, description="rows of A, and columns of B")
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    targets: tuple[Adapted, ...] = Field(default=ADAPTED, min_length=1, description="matrices of each layer by name")
    base: FrozenType = Field(default="bf16", description="how all peers hold the frozen matrices of the layers")

    @field_validator("targets")
    @classmethod
    def _are_in_one_order(cls, targets: tuple[Adapted, ...]) -> tuple[Adapted, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError("name each target once")
        return tuple(sorted(targets, key=ADAPTED.index))


TrustRegion = Literal["dppo", "m2po"]
MAX_GROUP_ANSWERS: Final = 256
MAX_ANSWER_TOKENS: Final = 2**15
MAX_POLICY_AGE: Final = 64  # rounds


class ReinforcementSection(Section):
    """Learning from scores of the model's own answers, which rollout peers draw and trainers check."""

    task: Name = Field(description="questions and scores, by name; of ours, or of a module in method.modules")
    version: int = Field(default=1, ge=1, le=1000, description="of the task; it changes with questions or scores")
    start_round: int = Field(
        default=0, ge=0, le=MAX_ROUNDS, description="rounds before it learn the text of [data], such as right answers"
    )
    group: int = Field(default=8, ge=2, le=MAX_GROUP_ANSWERS, description="answers to one question")
    groups: int = Field(default=16, ge=1, le=4096, description="groups of one inner step")
    answer_tokens: int = Field(default=64, ge=1, le=MAX_ANSWER_TOKENS, description="the most of one answer")
    temperature: float = Field(default=1.0, ge=0.05, le=10, description="of the draws")
    loss: str = Field(default="dppo", description="dppo or m2po: how far a step may move the policy")
    entropy: float = Field(default=0.0, ge=0, le=10, description="weight of the entropy of the draws, added to scores")
    rate_factor: float = Field(default=1.0, gt=0, le=100, description="of the learning rate, from start_round on")
    ahead: int = Field(default=1, ge=0, le=16, description="batches that a rollout peer may draw beyond the first")
    max_age: int = Field(default=4, ge=0, le=MAX_POLICY_AGE, description="rounds; older groups are dropped")
    wait_seconds: Timeout = Field(
        default=30.0, description="without a group until a trainer sends the steps that it has"
    )

    @field_validator("loss")
    @classmethod
    def _bounds_the_policy(cls, loss: str) -> str:
        if loss not in get_args(TrustRegion):
            raise ValueError(
                'write "dppo" or "m2po": a run without a trust region is refused, because its policy collapses'
            )
        return loss

    def has_begun(self, round_number: int) -> bool:
        """Return whether a round learns from scores."""
        return round_number >= self.start_round


HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_hub_name(text: str) -> bool:
    """Return whether a text names a repository of the Hugging Face Hub, such as ORG/NAME."""
    return HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


class HostSection(Section):
    """Further duties of the host of the run; peers do not get this table."""

    hub: str = Field(default="", description="repository of the Hugging Face Hub that gets the final model: ORG/NAME")

    @field_validator("hub")
    @classmethod
    def _is_repository(cls, hub: str) -> str:
        if hub and not is_hub_name(hub):
            raise ValueError('write a repository like "ORG/NAME"')
        return hub


class TrainSection(Section):
    """The settings of the inner optimizer.

    After the warm-up the learning rate decays to `final_share` of its peak.
    """

    batch_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS, description="tokens of one inner step on one peer")
    microbatch: int = Field(default=8, ge=1, le=4096, description="sequences of one forward pass")
    learning_rate: float = Field(gt=0, le=1e6)
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    decay_steps: int = Field(
        default=0, ge=0, le=MAX_STEPS, description="inner steps until the end of the decay; 0: constant"
    )
    schedule: Literal["cosine", "linear", "wsd"] = Field(
        default="cosine", description="shape of the decay; wsd keeps the peak until the last `decay_share` of it"
    )
    decay_share: float = Field(default=0.2, gt=0, le=1, description="wsd only: share of the decay steps that fall")
    final_share: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    clip: float = Field(default=1.0, gt=0, description="largest norm of the gradient")
    memory: MemoryMode = Field(
        default="normal", description="small: 8-bit moments, and a file for vectors that only rounds use"
    )


class MethodSection(Section):
    """A recipe by name; each table overrides one of its parts."""

    recipe: str
    modules: tuple[Annotated[str, AfterValidator(_check_module)], ...] = Field(
        default=(), max_length=MAX_MODULES, description="modules with parts of the organiser's own: name and SHA-256"
    )
    inner: OptionTable = {}
    signal: OptionTable = {}
    schedule: OptionTable = {}
    codec: OptionTable = {}
    feedback: OptionTable = {}
    topology: OptionTable = {}
    aggregate: OptionTable = {}
    update: OptionTable = {}
    adoption: OptionTable = {}

    def overrides(self) -> dict[str, OptionTable]:
        tables: dict[str, OptionTable] = self.model_dump(exclude={"recipe", "modules"})
        return {part: table for part, table in tables.items() if table}


class RoundSection(Section):
    """Deadlines of an outer round, in seconds."""

    grace: Timeout = Field(default=10.0, description="wait for others once half of the live peers have reported")
    leader_timeout: Timeout = Field(default=5.0, description="silence after which the next leader takes over")
    exchange_timeout: Timeout = Field(default=60.0, description="the longest an exchange may take")
    parts: int = Field(default=12, ge=1, le=4096, description="parts of a butterfly")


class AdmissionSection(Section):
    """The keys that may take part in the run and vote in its rounds."""

    mode: Literal["open", "list", "tickets"] = Field(
        default="open", description="votes are earned by contributions, given to `keys`, or signed by the organiser"
    )
    keys: PeerIds = Field(default=(), description="list only: peer ids of the keys that take part and vote")
    trusted: bool = Field(default=False, description="list only: the keys trust one another, so a majority decides")
    founders: PeerIds = Field(default=(), description="open only: peer ids of the keys that vote from the first round")
    revoked: PeerIds = Field(default=(), description="peer ids of keys that take no part any more")

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if (self.mode == "list") != bool(self.keys):
            raise ValueError('mode = "list" needs keys, and no other mode has them')
        if self.trusted and self.mode != "list":
            raise ValueError('only the keys of mode = "list" can be trusted')
        if self.founders and self.mode != "open":
            raise ValueError('only mode = "open" has founders')
        return self


class MembershipSection(Section):
    """Gossip interval, and time until a silent peer counts as gone; in seconds."""

    heartbeat: float = Field(default=2.0, ge=MIN_HEARTBEAT_SECONDS, le=MAX_HEARTBEAT_SECONDS)
    expiry: float = Field(default=15.0, ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS)

    @model_validator(mode="after")
    def _outlasts_heartbeats(self) -> Self:
        if self.expiry < HEARTBEATS_UNTIL_EXPIRY * self.heartbeat:
            raise ValueError(f"expiry must be at least {HEARTBEATS_UNTIL_EXPIRY} heartbeats")
        return self

    @property
    def vote_memory(self) -> float:
        """Return the seconds for which a peer that vanished keeps its vote in a round."""
        return 2 * self.expiry


class CheckpointSection(Section):
    every_rounds: int = Field(default=1, ge=1, le=MAX_ROUNDS)
    keep: int = Field(default=2, ge=1, le=MAX_KEPT_CHECKPOINTS)


class AuditSection(Section):
    """Audits: other peers repeat a share of the contributions, and compare every bit."""

    share: float = Field(default=0.0, ge=0, le=1, description="of the contributions that are audited; 0: none")


class TargetSection(Section):
    """The end of the run: the first of the given targets to be reached."""

    rounds: int | None = Field(default=None, ge=1, le=MAX_ROUNDS)
    tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    keepers: int = Field(
        default=DEFAULT_KEEPERS,
        ge=0,
        le=1000,
        description="machines that must hold the final state before the last leaves",
    )

    def progress(self, rounds: int, tokens: int) -> float:
        """Return how far a run has come, from 0 to 1; 0 without a target."""
        return max(tokens / self.tokens if self.tokens else 0.0, rounds / self.rounds if self.rounds else 0.0)


class AnnealSection(Section):
    """The final anneal: the last part of the run, in which the learning rate falls."""

    share: float = Field(default=0.0, ge=0, le=1, description="of the run up to its target; 0: none")
    final_share: float = Field(default=0.0, ge=0, le=1, description="of the learning rate, at the target")

    def rate_factor(self, progress: float) -> float:
        """Return the factor of the learning rate where the run has come so far, from 0 to 1; it is above zero."""
        if not self.share:
            return 1.0
        left = min(1.0, max(0.0, 1 - progress) / self.share)
        return max(LEAST_RATE_FACTOR, self.final_share + (1 - self.final_share) * left)


def _require_no_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("has a NUL character; remove it")
    return path


PathText = Annotated[str, AfterValidator(_require_no_nul)]


class SourceSection(Section):
    """One source of text. The only source of a run may have no name."""

    name: Name = Field(default="", description="name of the source in messages and figures")
    source: SourceKind
    path: PathText = Field(default="", description="glob, shard folder or data set name; relative to the manifest")
    split: str = Field(default="train", description="hf only")
    column: str = Field(default="text", description="hf only: the column that holds the text")
    weight: Weight = Field(default=1.0, description="share of the windows that a peer draws, relative to other sources")

    @property
    def key(self) -> str:
        """Return the name of the table in a manifest, for errors."""
        return f"data.sources.{self.name}" if self.name else "data"


def _require_some_weight(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        raise ValueError("set at least one weight above 0")
    return weights


SourceWeights = Annotated[dict[Name, Weight], Field(max_length=MAX_SOURCES), AfterValidator(_require_some_weight)]


class PhaseSection(Section):
    """Weights that hold from a share of the run, or a number of its tokens, on."""

    share: float | None = Field(default=None, gt=0, lt=1, description="share of the target from which the weights hold")
    tokens: int | None = Field(default=None, ge=1, description="tokens of the run from which the weights hold")
    weights: SourceWeights = Field(description="weights of the sources, by name")

    def has_begun(self, progress: float, tokens: int) -> bool:
        """Return whether the phase has begun at this token count and progress (0 to 1)."""
        return tokens >= self.tokens if self.tokens is not None else progress >= (self.share or 0.0)


class ChatSection(Section):
    """How conversations become text: the template of Hugging Face, and the tokens that it may write."""

    template: str = Field(default="", max_length=MAX_TEMPLATE_CHARACTERS, description="in Jinja; empty: ChatML")
    bos: str = Field(default="", max_length=100, description="the template's bos_token")
    eos: str = Field(default="", max_length=100, description="the template's eos_token")


class DataSection(Section):
    """The sources of the tokens: one, or a mixture of several."""

    source: Literal[SourceKind, "own"] | None = Field(
        default=None, description="the only source; absent: use data.sources"
    )
    path: PathText = Field(default="", description="glob, shard folder or data set name; relative to the manifest")
    split: str = Field(default="train", description="hf only")
    column: str = Field(default="text", description="hf only: the column that holds the text")
    tokenizer: PathText = Field(default="", description="tokenizer.json of all sources; empty: bytes")
    validation_share: float = Field(default=0.02, gt=0, lt=0.5)
    sources: tuple[SourceSection, ...] = Field(default=(), max_length=MAX_SOURCES, description="sources of a mixture")
    phases: tuple[PhaseSection, ...] = Field(
        default=(), max_length=MAX_PHASES, description="weights of later parts of the run"
    )
    chat: ChatSection | None = Field(
        default=None, description="the texts are conversations, of which answers alone are learned"
    )
    weights: SourceWeights | None = Field(
        default=None, description="weights by name; they replace the weights of sources and phases"
    )

    @model_validator(mode="after")
    def _has_sources(self) -> Self:
        if self.source is None and not self.sources:
            raise ValueError('source is missing; add it, such as source = "text", or tables [[data.sources]]')
        if self.sources and (self.source is not None or self.path):
            key = "path" if self.source is None else "source"
            raise ValueError(f"{key} cannot be combined with [[data.sources]]; move it into one of these tables")
        return self

    @model_validator(mode="after")
    def _conversations_are_read_as_text(self) -> Self:
        other = next((entry for entry in self.mixture if entry.source in ("tokens", "python-stdlib")), None)
        if self.chat is not None and (self.source == "own" or other is not None):
            raise ValueError('chat needs the source "text" (JSON lines or Parquet) or "hf"; change source')
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [entry.name for entry in self.sources]
        if "" in names:
            raise ValueError(f"sources.{names.index('')}.name is missing; add it")
        twice = next((number for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise ValueError(f"sources.{twice}.name is already in use; choose another name")
        if self.sources and not any(self.first_weights):
            raise ValueError("sources.0.weight is 0, like all others; set at least one weight above 0")
        return self

    @model_validator(mode="after")
    def _phases_are_complete(self) -> Self:
        names = [entry.name for entry in self.sources]
        for number, phase in enumerate(self.phases):
            if (phase.share is None) == (phase.tokens is None):
                raise ValueError(f"phases.{number} needs exactly one of share and tokens")
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
        """Return the weights at this token count and progress (0 to 1)."""
        names = [entry.name for entry in self.mixture]
        begun = [phase.weights for phase in self.phases if phase.has_begun(progress, tokens)]
        # Ignore a revision whose names do not match the sources; our tools never write one.
        revised = [] if self.weights is None or sorted(self.weights) != sorted(names) else [self.weights]
        named = [*begun, *revised]
        return tuple(named[-1][name] for name in names) if named else self.first_weights


class PipelineSection(Section):
    """Stages of the model on different peers; with one stage, every peer trains the whole model."""

    stages: int = Field(default=1, ge=1, le=MAX_STAGES, description="stages that the model is cut into")
    speeds: tuple[StageSpeed, ...] = Field(
        default=(), max_length=MAX_STAGES, description="of the peers of each stage together; empty: all alike"
    )
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

    audit_share: float = Field(
        default=0.0, ge=0, le=1, description="of the results of servers that others compute again, in exact steps"
    )

    @field_validator("staleness")
    @classmethod
    def _waits_for_backward(cls, staleness: int) -> int:
        if staleness:
            raise ValueError("steps while microbatches are on their way are not available yet; write 0")
        return staleness

    @model_validator(mode="after")
    def _has_a_speed_of_each_stage(self) -> Self:
        if self.speeds and len(self.speeds) != self.stages:
            reason = f"has {len(self.speeds)} speeds for {self.stages} stages"
            raise ValueError(f"speeds {reason}; write one for each stage, or none")
        return self

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
            if self.audit_share:
                raise ValueError(
                    'pipeline.audit_share: servers compute the same results only in exact steps; write mode = "exact", '
                    "or audit_share = 0"
                )
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

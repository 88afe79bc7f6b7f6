"""The tables of the manifest that have no module of their own."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from protocol.errors import MalformedError
from protocol.fault_words import shorten
from protocol.identity import public_key
from protocol.manifest.base import Name, PeerIds, Section, check_peer_id
from protocol.manifest.options import OptionTable

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
        tables: dict[str, OptionTable] = self.model_dump(exclude={"recipe"})
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

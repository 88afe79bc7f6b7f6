"""The run manifest: one TOML file that describes a whole run, parsed, checked and named by its hash.

The run id is the SHA-256 of the canonical form: sorted JSON of every value, defaults filled in. It leaves out the
bootstrap addresses and the table [about], which inform people and may change while the run lives, the place of the
first weights (their hashes are in it), those keys of `DEFAULTS_OUTSIDE_RUN_ID` that have their default, and [pipeline]
in a run with one stage.
"""

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from protocol.errors import MalformedError, ManifestError, MissingFileError
from protocol.fault_words import shorten
from protocol.identity import public_key
from protocol.manifest_data import DataSection
from protocol.manifest_faults import ManifestText, decode_text, describe_invalid_values, describe_toml_fault
from protocol.manifest_model import DEFAULT_BALANCE_LOSS, DEFAULT_MODEL_KIND, DEFAULT_NORM_EPSILON, ModelSection
from protocol.manifest_options import OptionTable
from protocol.manifest_pipeline import PipelineSection
from protocol.manifest_section import Name, PeerIds, Section, check_peer_id

RunId = str  # 64 hexadecimal digits
MAX_MANIFEST_BYTES = 64 * 1024
MAX_DOTS_PER_LINE = 500  # because the time to parse a dotted key grows with the square of its parts
DEFAULT_KEEPERS = 1
DEFAULTS_OUTSIDE_RUN_ID: tuple[tuple[str, str, object], ...] = (  # runs older than these keys keep their id
    ("model", "kind", DEFAULT_MODEL_KIND),
    ("model", "head_size", None),
    ("model", "norm_epsilon", DEFAULT_NORM_EPSILON),
    ("model", "experts", None),
    ("model", "experts_per_token", None),
    ("model", "normalize_experts", True),
    ("model", "balance_loss", DEFAULT_BALANCE_LOSS),
    ("model", "weights", []),
    ("model", "subspace", None),
    ("model", "rope_scaling", None),
    ("model", "tensors", []),
    ("model", "document_end", None),
    ("data", "sources", []),
    ("data", "phases", []),
    ("data", "weights", None),
    ("run", "organiser_key", ""),
    ("target", "keepers", DEFAULT_KEEPERS),
    ("audits", "share", 0.0),
    ("train", "memory", "normal"),
    ("anneal", "share", 0.0),
    ("anneal", "final_share", 0.0),
)
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


class Manifest(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    method: MethodSection
    round: RoundSection = RoundSection()
    pipeline: PipelineSection = PipelineSection()
    admission: AdmissionSection = AdmissionSection()
    membership: MembershipSection = MembershipSection()
    checkpoint: CheckpointSection = CheckpointSection()
    target: TargetSection = TargetSection()
    audits: AuditSection = AuditSection()
    anneal: AnnealSection = AnnealSection()
    about: AboutSection = AboutSection()

    @model_validator(mode="after")
    def _organiser_signs_tickets(self) -> Self:
        if self.admission.mode == "tickets" and not self.run.organiser_key:
            raise ValueError('admission.mode = "tickets" needs run.organiser_key, whose tickets count')
        return self

    @model_validator(mode="after")
    def _own_models_have_own_data(self) -> Self:
        if self.model.is_custom and self.data.source != "own":
            raise ValueError('data.source must be "own" with model.kind = "custom": each training loop brings its data')
        if self.model.is_custom and self.pipeline.is_cut:
            raise ValueError('pipeline.stages must be 1 with model.kind = "custom"')
        return self

    @model_validator(mode="after")
    def _batch_holds_a_sequence(self) -> Self:
        if self.model.is_custom:
            return self
        if self.train.batch_tokens % self.model.context:
            raise ValueError("train.batch_tokens must be a multiple of model.context")
        if self.model.document_end is not None and self.pipeline.is_cut:
            raise ValueError("model.document_end needs pipeline.stages = 1, as middle stages do not see the tokens")
        self.pipeline.require_fit(self.train.batch_tokens, self.model.context, self.model.stream_width)
        self.pipeline.require_exact_fit(self.data.mixture, self.train.batch_tokens, self.model.context)
        return self

    def canonical(self) -> bytes:
        values = self.model_dump(mode="json")
        del values["run"]["bootstrap"], values["about"], values["model"]["from"]
        for section, key, default in DEFAULTS_OUTSIDE_RUN_ID:
            if values[section].get(key) == default:
                values[section].pop(key, None)
        for section in ("audits", "anneal"):
            if not values[section]:
                del values[section]
        if not self.pipeline.is_cut:
            del values["pipeline"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def source_weights(self, rounds: int, tokens: int) -> tuple[float, ...]:
        """Return the weights of the sources of text after so many rounds and tokens."""
        return self.data.weights_at(self.target.progress(rounds, tokens), tokens)

    def rate_factor(self, rounds: int, tokens: int) -> float:
        """Return the factor of the final anneal after so many rounds and tokens, which all peers know."""
        return self.anneal.rate_factor(self.target.progress(rounds, tokens))

    @property
    def run_id(self) -> RunId:
        """Return the id under which peers make rounds: that of the run, or of one stage of it."""
        return self.whole_run_id

    @property
    def whole_run_id(self) -> RunId:
        """Return the id of the run, which tickets and revisions name."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def published(self) -> Self:
        """Return the manifest as others get it, without paths of this machine that they do not need."""
        return self.model_copy(update={"model": self.model.model_copy(update={"from_": ""})})

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def changed_keys(old: Manifest, new: Manifest) -> list[str]:
    """Return the keys of the run id whose values differ, such as `train.learning_rate 0.003 -> 0.001`."""
    before, after = (_flatten(json.loads(manifest.canonical())) for manifest in (old, new))
    return [
        f"{key} {_shown(before.get(key))} -> {_shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _shown(value: object) -> str:
    return "none" if value is None else shorten(json.dumps(value, ensure_ascii=False), 40)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest from a file.

    Raises MissingFileError or ManifestError, one line that says what to fix.
    """
    return parse_manifest(read_manifest_bytes(path, MAX_MANIFEST_BYTES), str(path))


def read_manifest_bytes(path: Path, limit: int) -> bytes:
    """Read a file that may be a pipe, once, and at most one byte more than `limit`.

    Raises MissingFileError.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise MissingFileError(f"cannot read the manifest {path}: {reason}; name an existing file") from error


def parse_manifest(text: bytes, origin: str) -> Manifest:
    """Parse and check a manifest; `origin` names the text in errors."""
    return validate_manifest(*parse_manifest_values(text, origin))


def parse_manifest_values(text: bytes, origin: str) -> tuple[dict[str, Any], ManifestText]:
    """Parse a manifest's TOML without checking its values. Raises ManifestError."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{origin}: a manifest has at most {MAX_MANIFEST_BYTES} bytes; shorten it")
    decoded = decode_text(text, origin)
    try:
        if any(line.count(".") > MAX_DOTS_PER_LINE for line in decoded.text.splitlines()):
            raise ValueError(f"more than {MAX_DOTS_PER_LINE} dots on a line")
        return tomllib.loads(decoded.text), decoded
    except RecursionError as error:
        raise decoded.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:  # not TOML, a number of thousands of digits
        raise decoded.fault(f"not valid TOML: {describe_toml_fault(error)}") from error


def validate_manifest(values: dict[str, Any], text: ManifestText) -> Manifest:
    """Check the values of a manifest; `text` names it, and the line of a key, in errors. Raises ManifestError."""
    try:
        # JSON mode lets arrays become tuples while every scalar stays strict.
        manifest = _validate(json.dumps(values, default=_refuse_date), text)
        _require_usable_weights(manifest, text)
        return manifest
    except RecursionError as error:
        raise text.fault("not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise text.fault(f"not valid TOML: {error}") from error


def _require_usable_weights(manifest: Manifest, text: ManifestText) -> None:
    """Raise ManifestError for weights of sources that would never hold. A revision of a running run may make such."""
    data, target = manifest.data, manifest.target
    names = [source.name for source in data.sources]
    if data.weights is not None and sorted(data.weights) != sorted(names):
        raise text.fault_at(("data", "weights"), f"must name each source: {', '.join(names) or 'there is only one'}")
    for number, phase in enumerate(data.phases):
        if phase.share is not None and target.tokens is target.rounds is None:
            reason = "is a share of the target, which is missing; add target.tokens"
            raise text.fault_at(("data", "phases", str(number), "share"), reason)


def manifest_of_values(values: dict[str, Any], origin: str) -> Manifest:
    """Check the values of a manifest that a program has changed; `origin` names them in errors."""
    return validate_manifest(values, ManifestText(origin, ""))


def _validate(values: str, text: ManifestText) -> Manifest:
    try:
        return Manifest.model_validate_json(values)
    except ValidationError as error:
        raise describe_invalid_values(error, Manifest, text) from error


def _refuse_date(value: object) -> str:
    raise ValueError(f"no key takes a date or time; put {value} in quotes")

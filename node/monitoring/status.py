"""Define the status of a node, its summary line, and the client that fetches it from /status."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.monitoring.stage_table import (
    MICROBATCH_FIELDS,
    StageEntry,
    describe_empty_stages,
    stage_lines,
    sum_microbatches,
)
from node.units import format_bytes, format_clock, format_count, format_plural
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.membership.record_fields import encode_source_losses
from protocol.pipeline.stage import stage_of

# Errors from which the node recovered, each with one line in the log; docs/reference/status.md explains the words.
RecoveredErrorKind = Literal[
    "not delivered",  # messages, to a peer that does not answer
    "not accepted",  # messages, by a peer that refuses them
    "blob missing",  # or damaged: the round continues here without it
    "not reduced",  # a part of the sum that this peer reduces
    "partner lost",  # a contribution of our group, with its owner
    "sync failed",  # the peer that was asked could not show how to catch up
    "not certified",  # a chain that a peer showed, so it is not followed
    "jump held",  # a preferred chain lacks more of our rounds than a peer may drop without a person
    "split",  # the run goes on as two chains without a kept round in common
    "not saved",  # a checkpoint
    "not logged",  # a line of metrics, on disk or by a logger
    "not relayed",  # a blob between two other peers
    "no relay",  # for a blob that we cannot fetch ourselves
    "blob late",  # it did not arrive within a round, and is requested again
    "not applied",  # a committed round: its state is fetched later
    "state differs",  # from the others' at the same point of the chain: theirs is fetched
    "trainer late",  # it did not apply an anchor in time
    "rollouts refused",  # of a peer whose groups failed their checks
    "sent again",  # a contribution of the chain that was left
    "contribution missing",  # from the disk: it is not submitted again
    "checkpoint skipped",
    "step void",  # an exact one: a stage lacks microbatches, or counts some twice, so it is made again
    "step skipped",  # by the trainer: the loss or the gradient was not finite
    "out of memory",  # the trainer continues with smaller microbatches
    "not compiled",  # although it should be: the trainer goes on without
    "machine refused",  # by the first machine of a site
    "no bf16",  # the card lacks it and trains in fp32
    "memory not pinned",  # the shared memory: copies to and from the accelerator are slower
    "work dropped",  # of the trainer: after a change of chain it cannot tell which of it is still unsent
    "state gone",  # an earlier one that other peers may be fetching
]
RoundOutcome = Literal["included", "excluded", "lost", "missed"]
CatchUpKind = Literal["replayed", "skipped"]

Phase = Literal[
    "starting",
    "joining",
    "waiting for peers",
    "training",
    "exchanging",
    "catching up",
    "paused",
    "leaving",
    "done",
    "watching",
    "rolling out",
]
MAX_STATUS_BYTES = 1 << 20
MAX_SHOWN_REVISIONS = 3
MAX_SHOWN_CONDUCT = 8
COMPUTE_ACTIVITIES: Final = ("compute", "evaluate")  # inner steps, and the validation of an anchor
MAX_ROUNDS_BEHIND = 2  # a contribution counts as current while at most this many rounds have been committed since


PACE_ROUNDS = 8  # over which the time left is estimated


@dataclass(frozen=True)
class RoundPace:
    """The committed rounds from which every place estimates the time left: page, host, join, up and status.

    `heads`: the rounds and the tokens after the last commits, oldest first. `seconds`: the durations of these rounds,
    whose median passes over a pause.
    """

    heads: Sequence[tuple[int, int]]
    seconds: Sequence[float]

    def seconds_left(self, target_rounds: int | None, target_tokens: int | None) -> float | None:
        """Return the time to the nearer target; None without one, or before two rounds are known."""
        if not self.seconds or not self.heads:
            return None
        (first_round, first_tokens), (rounds, tokens) = self.heads[0], self.heads[-1]
        left = [float(target_rounds - rounds)] if target_rounds else []
        if target_tokens and rounds > first_round and tokens > first_tokens:
            left.append((target_tokens - tokens) * (rounds - first_round) / (tokens - first_tokens))
        return max(0.0, min(left)) * median(self.seconds) if left else None


class DeviceUse(BaseModel):
    """The use of an accelerator by all programs; memory in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float | None = Field(default=None, ge=0, le=1, description="of the time; None: the driver does not say")
    memory: int = Field(ge=0)
    memory_total: int = Field(ge=0)


class MakerStatus(BaseModel):
    """The groups of one rollout peer: how many were learned from and refused, with the newest reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    taken: int = 0
    refused: int = 0
    reason: str = ""
    reward: float | None = Field(default=None, description="mean score of the answers that were learned from")


class LearningSample(BaseModel):
    """An answer that the model drew, with its score."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    maker: str
    question: str
    answer: str
    reward: float


class LearningStatus(BaseModel):
    """Learning from rollouts since the start of this process; rates and means are those of the newest step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    waiting: int = Field(default=0, description="groups in the pool")
    groups: int = Field(default=0, description="that were learned from")
    answers: int = 0
    tokens: int = 0
    reward: float | None = Field(default=None, description="mean score, from 0 to 1")
    length: float = Field(default=0.0, description="tokens of an answer")
    entropy: float = Field(default=0.0, description="nats a token, as the answers' makers reported them")
    mismatch: float = Field(default=0.0, description="KL divergence from the policies that drew, nats a token")
    effective: float = Field(default=1.0, description="share of tokens that count")
    clipped: float = Field(default=0.0, description="share of tokens outside the trust region")
    fates: dict[str, int] = Field(default={}, description="groups by fate")
    ages: dict[str, int] = Field(default={}, description="groups by age in rounds")
    rewards: dict[str, float] = Field(default={}, description="mean score by round, of the last ones")
    makers: dict[str, MakerStatus] = Field(default={}, description="by peer id")
    samples: tuple[LearningSample, ...] = ()


class ErrorRecorder(Protocol):
    """Counts and logs errors that need no action; implemented by StatusReporter."""

    def record_recovered(self, reason: RecoveredErrorKind, line: str) -> None: ...

    def record_refusal(self, peer: PeerId, first: PeerFault, *others: PeerFault) -> None: ...


class StatusSource(Protocol):
    def status(self) -> "NodeStatus": ...


def sum_seconds(seconds: Mapping[str, float], *activities: str) -> float:
    """Return the sum of a trainer's seconds over `activities`."""
    return sum(seconds.get(activity, 0.0) for activity in activities)


class NodeStatus(BaseModel):
    """The status of one node at one moment.

    Bytes count from `since`, the start of this process; `seconds` also count over restarts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: str
    run: str
    run_id: str
    stage: int | None = Field(default=None, description="of a pipeline, from 0; absent: the whole model")
    name: str = ""
    phase: Phase = "starting"
    reason: str = Field(default="", description="one line: why the node waits, or why its work was left out")
    absence: str = Field(default="", description="why the newest round has none of our work; empty: it has")
    trainer_trouble: str = Field(default="", description="why no trainer runs; empty: one does")
    unsaved: str = Field(default="", description="why the newest checkpoint is not on disk; empty: it is")
    has_vote: bool | None = Field(
        default=None, description="whether its key has a vote in the next round; absent before the first commit"
    )
    alone: bool = Field(default=False, description="no other trainer can be reached, though there are or were some")
    paused: str = Field(default="", description="why the trainer pauses; empty: it does not")
    standstill: str = Field(default="", description="for how long no round was decided; empty: not unusually long")
    pace: str = Field(default="", description="why fewer steps per round than planned; empty: all of them")
    round: int = Field(default=0, description="rounds committed and applied")
    target_rounds: int | None = None
    target_tokens: int | None = None
    revision: int = Field(default=0, description="number of the newest revision of the organiser in force; 0: none")
    revisions: tuple[str, ...] = Field(default=(), description="all known revisions of the organiser, a line each")
    step: int = Field(default=0, description="inner steps taken")
    tokens: int = Field(default=0, description="tokens this peer trained on")
    seconds_left: float | None = Field(default=None, description="to the target, at the pace of the last rounds")
    chain_tokens: int = Field(default=0, description="tokens of all peers in all committed rounds")
    loss: float | None = Field(default=None, description="recent training loss, nats a token")
    validation_loss: float | None = None
    validation_round: int | None = None
    validation_by_source: dict[str, float] = Field(default={}, description="of a mixture, by name of the source")
    tokens_per_second: float = 0.0
    learning_rate: float | None = Field(default=None, description="of the newest inner step")
    gradient_norm: float | None = Field(default=None, description="of the newest inner step, before clipping")
    device: str = Field(default="", description="that trains, or several together; empty before the trainer is ready")
    ranks: int = Field(default=1, description="devices that train together")
    device_use: float | None = Field(default=None, description="share of the time in which the accelerator computes")
    device_memory: int | None = Field(default=None, description="bytes in use on the accelerator, by all programs")
    device_memory_total: int | None = None
    cards: tuple[DeviceUse, ...] = Field(default=(), description="each of several accelerators that train together")
    digest: str = Field(default="", description="chained anchor digest, hexadecimal")
    trust: str = Field(default="", description="trust point of the newest round, for `murmur join --trust`")
    state_digest: str = Field(default="", description="hash of anchor and outer state, hexadecimal")
    peers: int = Field(default=0, description="live peers, this one included")
    contributions_included: int = 0
    contributions_excluded: int = 0
    last_included_round: int | None = Field(default=None, description="number of the round, the first is 0")
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_carried: int = Field(default=0, description="relayed between peers that cannot reach each other")
    bytes_sent_by_kind: dict[str, int] = {}
    bytes_received_by_kind: dict[str, int] = {}
    direct_port: int = Field(default=0, description="port for direct connections; 0: none are accepted")
    paths: dict[str, str] = Field(default={}, description="how bulk reaches each recent peer: direct or libp2p")
    bytes_fetched_by_path: dict[str, int] = Field(default={}, description="bytes of blobs by path: libp2p, direct")
    absences: dict[str, int] = Field(default={}, description="rounds without our work, by reason")
    setbacks: dict[str, int] = Field(default={}, description="recovered errors, by reason")
    refusals: dict[str, int] = Field(
        default={}, description="rejected or stalled messages and streams of peers, by reason"
    )
    conduct: tuple[str, ...] = Field(default=(), description="excluded and struck peers, a line each")
    skipped_rows: dict[str, int] = Field(
        default={}, description="rows of the text that the trainer could not use, by reason"
    )
    microbatches: dict[str, int] = Field(default={}, description="of a pipeline: own and served ones, by result")
    stage_rate: float = Field(default=0.0, description="microbatches a second that this node can compute")
    stages: tuple[StageEntry, ...] = Field(default=(), description="of a pipeline: the peers of each stage")
    kept: str = Field(default="", description="of a pipeline: the states of other stages that this node keeps")
    rollouts: dict[str, int] = Field(
        default={}, description="of a rollout peer: rounds applied, states fetched, groups by outcome"
    )
    learning: LearningStatus | None = Field(default=None, description="from rollouts; absent in runs without [rl]")
    audits: dict[str, int] = Field(default={}, description="contributions that this node repeated, by verdict")
    direct_refusals: dict[str, int] = Field(default={}, description="rejected direct connections, by reason")
    seconds: dict[str, float] = Field(default={}, description="by activity: compute, encode, wait, ...")
    trainer_restarts: int = 0
    addresses: tuple[str, ...] = ()
    key_conflict: str = Field(default="", description="another node that uses this node's key; empty: none is known")
    page: str = Field(default="", description="URL of the run's page on a host that only watches")
    since: float = Field(default=0.0, description="start of this process, seconds since the epoch")

    @property
    def is_done(self) -> bool:
        return self.phase == "done"

    def describe_contributing(self) -> str:
        """Return `yes`, or `no: ` and the reason."""
        if self.is_done:
            return "no: the run has reached its target"
        if self.phase == "watching":
            return "no: this host only watches; use `murmur host --train` to take part"
        if self.phase == "rolling out":
            return self._describe_rolling_out()
        if self.phase in ("starting", "joining", "waiting for peers", "paused", "leaving"):
            return f"no: {self.reason or self.phase}"
        if self.phase == "catching up":
            return f"no: catching up, {self.reason}"
        if self.trainer_trouble:
            return f"no: {self.trainer_trouble}"
        if self.paused:
            return f"no: paused, {self.paused}"
        if self.alone:
            return "no: no other training peer can be reached; check whether this machine is online"
        if self.standstill:
            return f"no: {self.standstill}; check whether the other peers run, and try `murmur doctor`"
        if self.last_included_round is None:
            return f"no: {self.absence or self.reason or 'its first contribution is not ready yet'}"
        missed = self.round - 1 - self.last_included_round
        if missed >= MAX_ROUNDS_BEHIND:
            return (
                f"no, not in the last {missed} rounds: {self.absence or self.reason or 'the reason is not known here'}"
            )
        return "yes"

    def summary(self) -> str:
        """Return the line that `murmur status` prints."""
        if self.phase == "watching":
            return self._watching_summary()
        if self.phase == "rolling out":
            return self._rollout_summary()
        decided = self.contributions_included + self.contributions_excluded
        pace = (self.pace,) if self.pace else ()
        return " · ".join(
            (
                self.describe_round(),
                *([] if self.stage is None else [f"stage {self.stage} of {len(self.stages)}"]),
                f"step {self.step}",
                f"{format_count(self.tokens_per_second)} tok/s",
                *([f"on {self.device}"] if self.ranks > 1 else []),
                *pace,
                *self.describe_left(),
                f"sent {format_bytes(self.bytes_sent)}",
                f"included {self.contributions_included}/{decided}",
                *self.describe_direct_paths(),
                *self.describe_relayed(),
                f"contributing: {self.describe_contributing()}",
                *describe_empty_stages(self.stages),
                *(["no vote yet"] if self.has_vote is False else []),
                *([f"not saved: {self.unsaved}"] if self.unsaved else []),
                *([self.key_conflict] if self.key_conflict else []),
            )
        )

    def learning_lines(self) -> tuple[str, ...]:
        """Return the progress of learning from rollouts, with a line for each maker; nothing where there is none."""
        found = self.learning
        if found is None or not (found.groups or found.fates):
            return ()
        reward = "-" if found.reward is None else f"{found.reward:.3f}"
        first = (
            f"rollouts: reward {reward}, {format_plural(found.groups, 'group')} learned, {found.length:.1f} tokens an "
            f"answer, entropy {found.entropy:.2f}, mismatch {found.mismatch:.4f}, effective {found.effective:.0%}"
        )
        makers = (
            f"rollouts of {maker}: {each.taken} taken, {each.refused} refused" + (each.reason and f": {each.reason}")
            for maker, each in list(found.makers.items())[-MAX_SHOWN_CONDUCT:]
        )
        return (first, *makers, f"rollout groups: {_format_counts(found.fates)}")

    def reason_lines(self) -> tuple[str, ...]:
        """Return the lines below the summary: the stages of a pipeline, and each kind of trouble since the start."""
        tables = (
            ("microbatches", {word: count for word, count in self.microbatches.items() if count}),
            ("missed rounds", self.absences),
            ("recovered errors", self.setbacks),
            ("refused", self.refusals),
            ("skipped rows", self.skipped_rows),
            ("direct connections refused", self.direct_refusals),
        )
        lines = tuple(f"{title}: {_format_counts(counts)}" for title, counts in tables if counts)
        revisions = (f"revision {line}" for line in self.revisions[-MAX_SHOWN_REVISIONS:])
        stages = stage_lines(self.stages, self.stage)
        return (
            *self.learning_lines(),
            *stages,
            *([self.kept] if self.kept else []),
            *revisions,
            *self.conduct[:MAX_SHOWN_CONDUCT],
            *lines,
        )

    def describe_left(self) -> tuple[str, ...]:
        """Return `9:38 left`, or nothing where that is not known."""
        return () if self.seconds_left is None else (f"{format_clock(self.seconds_left)} left",)

    def _watching_summary(self) -> str:
        peers = format_plural(self.peers, "peer")
        sent = f"sent {format_bytes(self.bytes_sent)}"
        conflict = [self.key_conflict] if self.key_conflict else []
        figures = (self.describe_round(), peers, *self.describe_left(), sent, "watching", f"page {self.page}")
        return " · ".join((*figures, *describe_empty_stages(self.stages), *conflict))

    def _describe_rolling_out(self) -> str:
        if self.trainer_trouble:
            return f"no: {self.trainer_trouble}"
        if self.rollouts.get("groups taken"):
            return "yes"
        return f"no: {self.absence or self.reason or 'no trainer has taken its groups yet'}"

    def _rollout_summary(self) -> str:
        figures = (
            self.describe_round(),
            "rolls out",
            f"{format_count(self.tokens_per_second)} tok/s",
            self.describe_groups(),
            f"sent {format_bytes(self.bytes_sent)}",
            *self.describe_direct_paths(),
            f"contributing: {self.describe_contributing()}",
        )
        unsaved = [f"not saved: {self.unsaved}"] if self.unsaved else []
        return " · ".join((*figures, *unsaved, *([self.key_conflict] if self.key_conflict else [])))

    def describe_groups(self) -> str:
        """Return how many groups of a rollout peer trainers have taken, of those that it made."""
        return f"groups taken {self.rollouts.get('groups taken', 0)}/{self.rollouts.get('groups made', 0)}"

    def describe_direct_paths(self) -> tuple[str, ...]:
        """Return `direct to 2 of 3`, or nothing before the first download."""
        direct = sum(path.startswith("direct") for path in self.paths.values())
        return (f"direct to {direct} of {len(self.paths)}",) if self.paths else ()

    def describe_relayed(self) -> tuple[str, ...]:
        """Return `relayed 2.1 MB for others`, or nothing without relayed bytes."""
        return (f"relayed {format_bytes(self.bytes_carried)} for others",) if self.bytes_carried else ()

    def record_fields(self) -> dict[str, str | bytes | int | float]:
        """Return the fields of the peer record that describe this node's work."""
        device_use = {} if self.device_use is None else {"device_use": self.device_use}
        learning = self.learning or LearningStatus()
        reward = {} if learning.reward is None else {"reward": learning.reward}
        return {
            **device_use,
            **reward,
            "rollouts": learning.groups or self.rollouts.get("groups taken", 0),
            **{MICROBATCH_FIELDS[word]: count for word, count in sum_microbatches(self.microbatches).items()},
            "stage": 0 if self.stage is None else self.stage + 1,
            "device_memory": self.device_memory or 0,
            "device_memory_total": self.device_memory_total or 0,
            "learning_rate": self.learning_rate or 0.0,
            "gradient_norm": self.gradient_norm or 0.0,
            "bytes_received": self.bytes_received,
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.loss or 0.0,
            "tokens_per_second": self.tokens_per_second,
            "bytes_sent": self.bytes_sent,
            "bytes_carried": self.bytes_carried,
            "validation_loss": self.validation_loss or 0.0,
            "validation_round": self.validation_round or 0,
            "validation_by_source": encode_source_losses(self.validation_by_source.values()),
            "compute_seconds": sum_seconds(self.seconds, *COMPUTE_ACTIVITIES),
            "exchange_seconds": sum_seconds(self.seconds, "encode", "adopt", "snapshot"),
            "wait_seconds": sum_seconds(self.seconds, "wait"),
        }

    def describe_validation(self) -> str:
        """Return the validation loss for people, and those of the sources of a mixture; empty if there is none.

        Peers measure different rounds, so the loss of an earlier one says which it is of.
        """
        if self.validation_loss is None:
            return ""
        sources = ", ".join(f"{name} {loss:.3f}" for name, loss in self.validation_by_source.items())
        earlier = "" if self.validation_round in (None, self.round) else f" after round {self.validation_round}"
        return f"validation {self.validation_loss:.3f}{earlier}" + (f" ({sources})" if sources else "")

    def describe_round(self) -> str:
        return f"round {self.round}" + (f"/{self.target_rounds}" if self.target_rounds else "")


def _format_counts(counts: Mapping[str, int]) -> str:
    """Format counts as `late 3, slow 1`, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered)


def first_status(manifest: Manifest, peer_id: PeerId, name: str) -> NodeStatus:
    """Return the status of a node of that name before it has done anything."""
    return NodeStatus(
        peer_id=peer_id,
        run=manifest.run.name,
        run_id=manifest.whole_run_id,
        stage=stage_of(manifest),
        name=name,
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
    )


async def fetch_status(port: int, deadline: float) -> NodeStatus:
    """Fetch the status of the node with this metrics port on loopback.

    Raises:
        UnreachableError: No node of this version answered within `deadline` seconds.
    """
    try:
        async with asyncio.timeout(deadline):
            body = await _http_get(port, "/status")
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise UnreachableError(f"no node answers on 127.0.0.1:{port}; start it with `murmur join`") from error
    try:
        return NodeStatus.model_validate_json(body)
    except ValidationError as error:
        raise UnreachableError(f"127.0.0.1:{port} is not a node of this version; restart the node") from error


async def _http_get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_STATUS_BYTES)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        response = bytearray()
        while len(response) <= MAX_STATUS_BYTES and (chunk := await reader.read(1 << 16)):
            response += chunk
    finally:
        writer.close()
    head, _, body = bytes(response).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] + b" ":
        return b""
    return body

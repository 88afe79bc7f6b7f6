"""Serve /metrics (Prometheus or OpenMetrics text), /healthz and /status (JSON).

A scrape reads the fields of the status at that moment, so the two never disagree; `Metrics` keeps only the counters
that the status does not have.
"""

import collections
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from node.data.skipped_rows import SkipReason
from node.monitoring.http_server import open_listener, serve
from node.monitoring.status import (
    CatchUpKind,
    DeviceUse,
    LearningStatus,
    NodeStatus,
    RecoveredErrorKind,
    RoundOutcome,
    StatusSource,
)
from node.units import ALL_INTERFACES, parse_host_port
from protocol.consensus.messages.contributions import AppliedContributions

MAX_CONNECTIONS = 32


class RefusalCounter(Protocol):
    @property
    def refusals(self) -> Mapping[str, int]: ...


class StoreSize(Protocol):
    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...


class Metrics(Collector):
    """The counters of one node. Labels come from our own code, never from a peer, so there are few of them."""

    def __init__(self) -> None:
        self.rounds: collections.Counter[str] = collections.Counter()
        self._refusals: collections.Counter[str] = collections.Counter()
        self._refusal_counters: list[RefusalCounter] = []
        self.missed_rounds: collections.Counter[str] = collections.Counter()
        self.recovered_errors: collections.Counter[str] = collections.Counter()
        self.skipped_rows: collections.Counter[str] = collections.Counter()
        self.applied: collections.Counter[str] = collections.Counter()
        self.outer_steps = 0.0
        self.revisions: collections.Counter[str] = collections.Counter()
        self.catch_ups: collections.Counter[str] = collections.Counter()
        self.pauses = self.early_submits = 0
        self._stores: list[StoreSize] = []
        self._status: StatusSource | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def read_status_from(self, status: StatusSource) -> None:
        """Read the status at each scrape."""
        self._status = status

    def record_round(self, outcome: RoundOutcome) -> None:
        """Count a round by its outcome.

        "missed": committed without a contribution of ours; "lost": the outcome of ours is unknown.
        """
        self.rounds[outcome] += 1

    def record_applied(self, applied: AppliedContributions, step_scale: float) -> None:
        """Count the contributions applied with one more round, and the fraction of a full outer step."""
        self.applied.update(contributions=len(applied.peers), parts=applied.part_count, bytes=applied.total_bytes)
        self.outer_steps += step_scale

    def record_recovered(self, reason: RecoveredErrorKind) -> None:
        self.recovered_errors[reason] += 1

    def record_missed(self, reason: str, rounds: int) -> None:
        """Count rounds without this node's work; `reason` is a fixed short word such as `late`."""
        if rounds:
            self.missed_rounds[reason] += rounds

    def record_skipped_rows(self, counts: Mapping[SkipReason, int]) -> None:
        """Count rows of the text that the trainer could not use."""
        self.skipped_rows.update(counts)

    def record_revised(self, outcome: str) -> None:
        """Count an earlier contribution whose outcome on the new chain differs from the old one."""
        self.revisions[outcome] += 1

    def record_catch_up(self, how: CatchUpKind, rounds: int) -> None:
        self.catch_ups[how] += rounds

    def record_pause(self) -> None:
        """Count a pause of the trainer for other programs that use its device."""
        self.pauses += 1

    def record_early_submit(self) -> None:
        """Count a request to submit early, because the other peers were waiting."""
        self.early_submits += 1

    def record_refusal(self, reason: str) -> None:
        """Count a rejected or stalled message of a peer; `reason` is a fixed short word such as `forged`."""
        self._refusals[reason] += 1

    def add_refusal_counter(self, counter: RefusalCounter) -> None:
        """Include the refusals that another component counts by the same reasons."""
        self._refusal_counters.append(counter)

    def add_store(self, store: StoreSize) -> None:
        """Include the blobs of this store."""
        self._stores.append(store)

    @property
    def refusals(self) -> collections.Counter[str]:
        return sum((collections.Counter(counter.refusals) for counter in self._refusal_counters), self._refusals)

    def collect(self) -> Iterator[Metric]:
        yield _labelled_counter(
            "murmur_rounds", "Rounds by outcome of this node's contribution", "outcome", self.rounds
        )
        yield _labelled_counter(
            "murmur_refusals", "Messages and streams of peers that were rejected or stalled", "reason", self.refusals
        )
        yield _labelled_counter(
            "murmur_absences", "Rounds without this node's work, by reason", "reason", self.missed_rounds
        )
        yield _labelled_counter(
            "murmur_setbacks", "Errors from which the node recovered", "reason", self.recovered_errors
        )
        yield _labelled_counter(
            "murmur_data_skipped", "Rows of the text that the trainer could not use", "reason", self.skipped_rows
        )
        yield _labelled_counter(
            "murmur_entered", "Contributions, parts and bytes applied to this node's state", "what", self.applied
        )
        yield CounterMetricFamily(
            "murmur_outer_steps",
            "Outer steps applied, as the sum of the fractions of a full step",
            value=self.outer_steps,
        )
        yield _labelled_counter(
            "murmur_revisions", "Contributions whose outcome changed with the chain", "fate", self.revisions
        )
        yield _labelled_counter(
            "murmur_catch_ups", "Rounds made by others and caught up with, by method", "how", self.catch_ups
        )
        yield CounterMetricFamily("murmur_pauses", "Pauses of training for other programs", value=self.pauses)
        yield CounterMetricFamily(
            "murmur_hurries", "Early submits, because other peers waited for this node", value=self.early_submits
        )
        yield GaugeMetricFamily("murmur_blobs", "Blobs held", value=sum(len(store) for store in self._stores))
        yield GaugeMetricFamily(
            "murmur_blob_bytes", "Bytes of blobs held", value=sum(store.size for store in self._stores)
        )
        if self._status is not None:
            yield from _status_metrics(self._status.status())


def _labelled_counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _status_metrics(status: NodeStatus) -> Iterator[Metric]:
    about = {"peer": status.peer_id, "run": status.run, "run_id": status.run_id, "name": status.name}
    yield InfoMetricFamily("murmur_node", "Identity of this node", value=about)
    yield CounterMetricFamily("murmur_tokens", "Tokens this node trained on", value=status.tokens)
    revision = "Number of the organiser's newest revision of the manifest in force"
    yield GaugeMetricFamily("murmur_steering_revision", revision, value=status.revision)
    yield CounterMetricFamily("murmur_trainer_restarts", "Restarts of the trainer", value=status.trainer_restarts)
    yield _labelled_counter("murmur_seconds", "Seconds by activity", "activity", status.seconds)
    yield _bytes_metric(status)
    relayed = "Bytes relayed between peers that cannot reach each other"
    yield CounterMetricFamily("murmur_carried_bytes", relayed, value=status.bytes_carried)
    yield _labelled_counter("murmur_fetched_bytes", "Bytes of blobs received", "path", status.bytes_fetched_by_path)
    yield _labelled_counter(
        "murmur_direct_refusals", "Rejected direct connections, by reason", "reason", status.direct_refusals
    )
    yield _labelled_counter(
        "murmur_microbatches", "Microbatches of a pipeline, own and served ones", "result", status.microbatches
    )
    yield _labelled_counter("murmur_rollouts", "Work of a rollout peer by outcome", "outcome", status.rollouts)
    yield _labelled_counter("murmur_audits", "Audits of others' contributions", "verdict", status.audits)
    yield from _card_metrics(status.cards)
    if status.learning is not None:
        yield from _learning_metrics(status.learning)
    stage_rate = "Microbatches a second that this node can compute at its stage of a pipeline"
    gauges: tuple[tuple[str, str, float | None], ...] = (
        ("murmur_paused", "1 while training pauses for other programs that use the device", float(bool(status.paused))),
        ("murmur_loss", "Recent training loss, nats a token", status.loss),
        ("murmur_validation_loss", "Loss on held-out text, nats a token", status.validation_loss),
        ("murmur_stage_rate", stage_rate, None if status.stage is None else status.stage_rate),
        ("murmur_round", "Rounds committed and applied", status.round),
        ("murmur_step", "Inner steps taken", status.step),
        ("murmur_chain_tokens", "Tokens of all peers in all committed rounds", status.chain_tokens),
        ("murmur_tokens_per_second", "Speed of this node", status.tokens_per_second),
        ("murmur_learning_rate", "Learning rate of the newest inner step", status.learning_rate),
        ("murmur_gradient_norm", "Norm of the newest gradient, before clipping", status.gradient_norm),
        ("murmur_ranks", "Devices that train together", status.ranks),
        ("murmur_device_use", "Share of the time in which the accelerator computes", status.device_use),
        ("murmur_device_memory_bytes", "Bytes in use on the accelerator", status.device_memory),
        ("murmur_device_memory_total_bytes", "Bytes of the accelerator's memory", status.device_memory_total),
        ("murmur_peers_known", "Live peers, this one included", status.peers),
        ("murmur_start_time_seconds", "Start of this process since the epoch", status.since),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)


def _learning_metrics(learning: LearningStatus) -> Iterator[Metric]:
    """Yield the figures of learning from rollouts."""
    yield _labelled_counter("murmur_rollout_groups", "Groups of rollouts by fate", "fate", learning.fates)
    yield _labelled_counter("murmur_rollout_ages", "Groups learned from, by age in rounds", "age", learning.ages)
    yield CounterMetricFamily("murmur_rollout_tokens", "Tokens of answers learned from", value=learning.tokens)
    gauges = (
        ("murmur_rollout_reward", "Mean score of the answers of the newest step", learning.reward),
        ("murmur_rollout_length", "Tokens of an answer", learning.length),
        ("murmur_rollout_entropy", "Entropy of the draws, nats a token", learning.entropy),
        ("murmur_rollout_mismatch", "KL divergence from the policies that drew, nats a token", learning.mismatch),
        ("murmur_rollout_effective", "Share of tokens that count by importance", learning.effective),
        ("murmur_rollout_clipped", "Share of tokens outside the trust region", learning.clipped),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)


def _card_metrics(cards: Sequence[DeviceUse]) -> Iterator[Metric]:
    """Yield the use of each of several accelerators that train together."""
    values: tuple[tuple[str, str, list[float | None]], ...] = (
        ("murmur_card_use", "Share of the time in which a card computes", [card.share for card in cards]),
        ("murmur_card_memory_bytes", "Bytes in use on a card", [card.memory for card in cards]),
        ("murmur_card_memory_total_bytes", "Bytes of a card's memory", [card.memory_total for card in cards]),
    )
    for name, text, by_card in values:
        family = GaugeMetricFamily(name, text, labels=["card"])
        for number, value in enumerate(by_card):
            if value is not None:
                family.add_metric([str(number)], value)
        if family.samples:
            yield family


def _bytes_metric(status: NodeStatus) -> CounterMetricFamily:
    family = CounterMetricFamily("murmur_bytes", "Bytes between peers", labels=["direction", "kind"])
    for direction, total, kinds in (
        ("sent", status.bytes_sent, status.bytes_sent_by_kind),
        ("received", status.bytes_received, status.bytes_received_by_kind),
    ):
        for kind, count in kinds.items():
            family.add_metric([direction, kind], count)
        # Bytes without a kind are "other", so the kinds add up to the total.
        family.add_metric([direction, "other"], max(0, total - sum(kinds.values())))
    return family


@contextlib.asynccontextmanager
async def serve_metrics(address: str, metrics: Metrics, status: StatusSource) -> AsyncIterator[int]:
    """Serve at HOST:PORT in the running loop; yield the port (a free one for 0). Raises UsageError if it is taken."""
    metrics.read_status_from(status)
    host, port = parse_host_port(address, "--metrics")
    listener = open_listener(host, port, "--metrics")
    async with serve(_build_application(metrics, status, host in ALL_INTERFACES), listener, MAX_CONNECTIONS) as bound:
        yield bound


def _build_application(metrics: Metrics, status: StatusSource, on_all_interfaces: bool) -> Starlette:
    async def scrape(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(metrics.registry), headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        return PlainTextResponse(f"ok {status.status().phase}\n")

    async def full_status(_: Request) -> Response:
        return Response(status.status().model_dump_json(), media_type="application/json")

    routes = [Route("/metrics", scrape), Route("/healthz", health), Route("/status", full_status)]
    # DNS rebinding: a web page must not reach us through a name that it resolves to 127.0.0.1.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if on_all_interfaces else ["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])

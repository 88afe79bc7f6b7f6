"""Numbers for machines: /metrics (Prometheus or OpenMetrics text), /healthz and /status (JSON).

What the status already says is read from it at the moment of the scrape, so the two can never disagree;
`Metrics` keeps only what the status does not hold.
"""

import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Literal

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

from node.status import NodeStatus
from node.web import EVERYWHERE, host_and_port, listening, serving
from protocol.rounds.entries import Entries

# What went wrong and was worked around: each with one line in the log.
Setback = Literal[
    "not delivered",  # statements, to a peer that does not answer
    "not accepted",  # statements, by a peer that refuses them
    "blob missing",  # or damaged: a round goes on here without it
    "not reduced",  # a part of the sum that was ours
    "partner lost",  # a group's message that died with its owner
    "way lost",  # to where the others are: the peer that was asked could not show it
    "not saved",  # a checkpoint
    "not carried",  # a blob between two others
    "no carrier",  # for a blob that we cannot fetch ourselves
    "blob late",  # it has not come in a round's time, and is asked for again
    "not applied",  # a round that is decided: its state is fetched later
    "state differs",  # from the others' at the same point of the chain: theirs is fetched
    "not adopted",  # by the trainer, in time
    "given back",  # a message of the chain that was left
    "message gone",  # from the disk: it is not offered again
    "checkpoint skipped",
    "step left out",  # of the trainer: its loss or gradient was not finite
    "memory short",  # the trainer goes on with smaller microbatches
    "memory not pinned",  # what the trainer shares with us: its accelerator takes longer to copy it
    "work dropped",  # of the trainer: on another chain it cannot be told any more what of it is still to be sent
    "state gone",  # an earlier one that others may be fetching
]
Outcome = Literal["included", "excluded", "lost", "missed"]
CatchUp = Literal["replayed", "skipped"]
MAX_CONNECTIONS = 32


class Metrics(Collector):
    """Counters of one node. Labels are words of our own code, never a peer's: their number stays small."""

    def __init__(self) -> None:
        self.rounds: collections.Counter[str] = collections.Counter()
        self._refusals: collections.Counter[str] = collections.Counter()
        self._counted_elsewhere: Callable[[], Iterable[Mapping[str, int]]] = tuple
        self.absences: collections.Counter[str] = collections.Counter()
        self.setbacks: collections.Counter[str] = collections.Counter()
        self.entries: collections.Counter[str] = collections.Counter()
        self.outer_steps = 0.0
        self.revisions: collections.Counter[str] = collections.Counter()
        self.catch_ups: collections.Counter[str] = collections.Counter()
        self.pauses = self.hurries = 0
        self.blobs = 0
        self.blob_bytes = 0
        self._status: Callable[[], NodeStatus] | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def watch(self, status: Callable[[], NodeStatus]) -> None:
        """From now on the status is read at each scrape."""
        self._status = status

    def round_ended(self, outcome: Outcome) -> None:
        """`missed`: a round was committed without an offer of ours; `lost`: what became of it is not known."""
        self.rounds[outcome] += 1

    def entered(self, entries: Entries, step: float) -> None:
        """What went into this node's state with one more round, and which share of a whole step that was."""
        self.entries.update(contributions=len(entries.peers), parts=entries.parts, bytes=entries.size)
        self.outer_steps += step

    def set_back(self, reason: Setback) -> None:
        self.setbacks[reason] += 1

    def was_absent(self, reason: str, rounds: int) -> None:
        """So many rounds went without this node's work; `reason` is a fixed short word such as `late`."""
        if rounds:
            self.absences[reason] += rounds

    def revised(self, fate: str) -> None:
        """An earlier message has this fate on the chain that was taken over, and had another one before."""
        self.revisions[fate] += 1

    def caught_up(self, how: CatchUp, rounds: int) -> None:
        self.catch_ups[how] += rounds

    def paused(self) -> None:
        """The trainer stands back for others who use its device."""
        self.pauses += 1

    def hurried(self) -> None:
        """The others waited for this node: its trainer was asked for what it had."""
        self.hurries += 1

    def refused(self, reason: str) -> None:
        """Something of a peer was refused or stalled; `reason` is a fixed short word such as `forged`."""
        self._refusals[reason] += 1

    def add_refusals(self, counted: Callable[[], Iterable[Mapping[str, int]]]) -> None:
        """What the parts that know no daemon have counted themselves, by the same words."""
        self._counted_elsewhere = counted

    @property
    def refusals(self) -> collections.Counter[str]:
        return sum(map(collections.Counter, self._counted_elsewhere()), self._refusals)

    def collect(self) -> Iterator[Metric]:
        yield _labelled("murmur_rounds", "Rounds by what became of this node's part", "outcome", self.rounds)
        yield _labelled("murmur_refusals", "What peers sent and was refused, or stalled", "reason", self.refusals)
        yield _labelled("murmur_absences", "Rounds without this node's work, by why", "reason", self.absences)
        yield _labelled("murmur_setbacks", "What went wrong and was worked around", "reason", self.setbacks)
        yield _labelled("murmur_entered", "What went into this node's state, round by round", "what", self.entries)
        yield CounterMetricFamily("murmur_outer_steps", "Rounds, each by its share of a step", value=self.outer_steps)
        yield _labelled("murmur_revisions", "Messages with another fate on another chain", "fate", self.revisions)
        yield _labelled("murmur_catch_ups", "Rounds that others made meanwhile, by how", "how", self.catch_ups)
        yield CounterMetricFamily("murmur_pauses", "Times that training stood back for others", value=self.pauses)
        yield CounterMetricFamily("murmur_hurries", "Times that the others waited for this node", value=self.hurries)
        yield GaugeMetricFamily("murmur_blobs", "Blobs held", value=self.blobs)
        yield GaugeMetricFamily("murmur_blob_bytes", "Bytes of blobs held", value=self.blob_bytes)
        if self._status is not None:
            yield from _of_status(self._status())


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _of_status(status: NodeStatus) -> Iterator[Metric]:
    about = {"peer": status.peer_id, "run": status.run, "run_id": status.run_id, "name": status.name}
    yield InfoMetricFamily("murmur_node", "Who this is", value=about)
    yield CounterMetricFamily("murmur_tokens", "Tokens this node trained on", value=status.tokens)
    yield CounterMetricFamily("murmur_trainer_restarts", "Deaths of the trainer", value=status.trainer_restarts)
    yield _labelled("murmur_seconds", "Seconds by activity", "activity", status.seconds)
    yield _bytes_moved(status)
    carried = "Bytes passed on between others that cannot reach each other"
    yield CounterMetricFamily("murmur_carried_bytes", carried, value=status.bytes_carried)
    yield _labelled("murmur_fetched_bytes", "Bytes of blobs received", "path", status.bytes_fetched_by_path)
    yield _labelled(
        "murmur_direct_refusals", "Direct connections not taken, by reason", "reason", status.direct_refusals
    )
    gauges: tuple[tuple[str, str, float | None], ...] = (
        ("murmur_paused", "1 while training stands back for others who use the device", float(bool(status.paused))),
        ("murmur_loss", "Recent training loss, nats a token", status.loss),
        ("murmur_validation_loss", "Loss on held-out text, nats a token", status.validation_loss),
        ("murmur_round", "Rounds committed and applied", status.round),
        ("murmur_step", "Inner steps taken", status.step),
        ("murmur_chain_tokens", "Tokens of all peers in all committed rounds", status.chain_tokens),
        ("murmur_tokens_per_second", "Speed of this node", status.tokens_per_second),
        ("murmur_peers_known", "Live peers, this one included", status.peers),
        ("murmur_start_time_seconds", "Start of this process since the epoch", status.since),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)


def _bytes_moved(status: NodeStatus) -> CounterMetricFamily:
    family = CounterMetricFamily("murmur_bytes", "Bytes between peers", labels=["direction", "kind"])
    for direction, total, kinds in (
        ("sent", status.bytes_sent, status.bytes_sent_by_kind),
        ("received", status.bytes_received, status.bytes_received_by_kind),
    ):
        for kind, count in kinds.items():
            family.add_metric([direction, kind], count)
        # The sum over kinds is the total, whatever is not attributed to a kind.
        family.add_metric([direction, "other"], max(0, total - sum(kinds.values())))
    return family


@contextlib.asynccontextmanager
async def metrics_server(address: str, metrics: Metrics, status: Callable[[], NodeStatus]) -> AsyncIterator[int]:
    """Serve at HOST:PORT in the running loop; yields the port (a free one for 0). UsageError if it is taken."""
    metrics.watch(status)
    host, port = host_and_port(address, "--metrics")
    listener = listening(host, port, "--metrics")
    async with serving(_application(metrics, status, host in EVERYWHERE), listener, MAX_CONNECTIONS) as bound:
        yield bound


def _application(metrics: Metrics, status: Callable[[], NodeStatus], everywhere: bool) -> Starlette:
    async def scrape(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(metrics.registry), headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        return PlainTextResponse(f"ok {status().phase}\n")

    async def whole(_: Request) -> Response:
        return Response(status().model_dump_json(), media_type="application/json")

    routes = [Route("/metrics", scrape), Route("/healthz", health), Route("/status", whole)]
    # A page in a browser must not reach us through a name that it makes point to 127.0.0.1.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if everywhere else ["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])

"""The share of their compute that peers can use in a run, by arithmetic alone.

Five limits, each a factor of the prediction. S stages, a microbatch takes C_s operations at stage s (C on average) and
uploads u_s bytes (u on average): one activation to each neighbour, so u = 2 activations x (S - 1) / S. Peer r has v_r
operations and b_r bytes a second, in each direction.

    ideal     X = sum of v_r / (S C)                       every device always computes
    links     f_r = min(1, (C / v_r) / (u / b_r))          mean of f_r, weighted by v_r
    stages    min over s of sum over r in s of min(v_r / C_s, b_r / u_s), compared with what the links allow
    window    N microbatches on their way; busy are as many as there are peers and as X carries on its way:
              P = peers + X (2 S RTT + 2 (S - 1) transfers). N / P of 1, 2, 4, 8 reaches 0.65, 0.87, 0.97, 1 (measured
              with 4 stages of peers of speeds 1:2:4:8). Windows above 8 P cost time where speeds differ and steps wait
              for all of their microbatches: 0.55 at 32 P (one measurement).
    step      mean of q / (q + w), by the rates v          to fill and to drain a step of q microbatches, and to wait
              w = S - 1 + 5 (v / lowest v - 1)             for some at the slowest peer (measured at 1:2:4:8)
    round     T / max(T + h + max(0, t - a), all bytes / b_r, p / cores)
              T seconds of training, t of the exchange, a of which train on, p of a core, h of a trainer held

The bytes of a round: every peer sends its message to each of n - 1 others (gather), to the reducers of its parts and
one part of the sums to all (butterfly), or to its group (groups).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node.commands.plan.peers import PeerKind
from optim.topologies import TopologyOptions
from protocol.consensus.topology import Butterfly
from protocol.manifest.run import Manifest
from protocol.manifest.sections import INT8_BLOCK, INT8_SCALE_BYTES

WINDOW_POINTS = ((1.0, 0.65), (2.0, 0.87), (4.0, 0.97), (8.0, 1.0))
TOO_LARGE_POINTS = ((8.0, 1.0), (32.0, 0.55))
GOOD_WINDOW = 4.0
UNEQUAL = 2.0  # times as fast as another peer of the stage
SLOWEST, SLOWEST_WAIT = 8.0, 5.0  # times as slow as the fastest peer; microbatches that others wait for such a peer
EXCHANGE_ROUND_TRIPS = 4  # roster, fetch, proposal, commit
# To encode, to check and merge contributions, to update, to hash and to apply the result: all processes of a peer in
# rounds of four (`benchmarks/grid.py`).
CORE_SECONDS_PER_VALUE = 19e-9
HELD_SECONDS_PER_VALUE = 1e-9  # of the trainer: copies from and to the card, and work of its own thread
FORMATS = {  # bytes of a value on its way
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1.0 + INT8_SCALE_BYTES / INT8_BLOCK,
}
SUBSPACE_PART = 8  # width / model.subspace, for comparison
Placement = tuple[Counter[int], ...]  # by stage: how many peers of each kind, by its number


@dataclass(frozen=True)
class StageCost:
    """One stage. A microbatch of a run with one stage is one sequence.

    Args:
        flops: operations of a microbatch, both passes.
        sent_bytes: activations and gradients that its peers upload for a microbatch; as many as they download.
        message_bytes: mean size of a contribution.
        held: microbatches between their two passes that fit into `pipeline.memory` of a peer; 0 without a pipeline.
        memory: bytes that a machine needs, by kind of device.
        launch_seconds: of a microbatch on a card, however fast it computes; 0 for stages.
    """

    stage: int
    layers: int
    parameters: int
    flops: float
    sent_bytes: float
    message_bytes: float
    held: int
    memory: dict[str, float]
    launch_seconds: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A run, from which all predictions follow without its model and its method (and so without loading torch).

    Args:
        manifest: the run.
        topology: of its settled rounds, whose steps `ahead` peers train on while a round is exchanged.
        ahead: the number of these steps.
        stages: the work of each stage.
        step_microbatches: of an inner step of a peer.
        steps: inner steps of a round.
        activation_bytes: that a microbatch sends to a neighbour.
        parameters: of the whole model.
        rollout_memory: bytes of main memory of a rollout peer; None in a run that does not learn from scores.
    """

    manifest: Manifest
    topology: TopologyOptions
    ahead: int
    stages: tuple[StageCost, ...]
    step_microbatches: int
    steps: float
    activation_bytes: float
    parameters: int
    rollout_memory: int | None = None

    @property
    def is_cut(self) -> bool:
        return len(self.stages) > 1


SUBSPACE_FORMATS = {f"{name}, subspace of width/{SUBSPACE_PART}": name for name in ("bf16", "int8")}


@dataclass(frozen=True)
class Window:
    """Microbatches on their way: `total` of all owners, `needed` to keep all peers busy, `advised` for each owner."""

    fraction: float
    total: float
    needed: float
    advised: int
    is_limited_by_memory: bool
    is_too_large: bool


@dataclass(frozen=True)
class StagePrediction:
    """Microbatches a second of one stage: by compute alone, and with its links; seconds of a round."""

    peers: int
    compute_rate: float
    rate: float
    round_seconds: float
    round_fraction: float


@dataclass(frozen=True)
class Prediction:
    """The factors, their product and the numbers behind them; `rate` is in microbatches a second."""

    placement: Placement
    links: float
    stages: float
    window: Window
    step: float
    round: float
    fraction: float
    rate: float
    by_stage: tuple[StagePrediction, ...]
    links_by_format: Mapping[str, float]


def predict(work: Workload, kinds: Sequence[PeerKind]) -> Prediction:
    """Predict the share of the compute of all peers that fit, which is 0 if a stage has no peer."""
    placement = place_peers(work, kinds)
    computes = [stage_rate(stage, kinds, placed, with_links=False) for stage, placed in zip_stages(work, placement)]
    rates = [stage_rate(stage, kinds, placed) for stage, placed in zip_stages(work, placement)]
    used = [kind for number, kind in enumerate(kinds) if any(placed[number] for placed in placement)]
    links = links_fraction(work, used)
    ideal = _ideal_rate(work, used)
    if not work.is_cut:
        ideal = sum(computes)
    balance = min(1.0, min(rates) / (ideal * links)) if ideal else 0.0
    window = window_of(work, kinds, placement, min(rates))
    step = step_fraction(work, kinds, placement)
    rate = min(rates) * window.fraction * step
    by_stage = tuple(
        _stage_prediction(work, kinds, stage, placed, (computes[stage.stage], rates[stage.stage], rate))
        for stage, placed in zip_stages(work, placement)
    )
    round_fraction = min(stage.round_fraction for stage in by_stage)
    return Prediction(
        placement, links, balance, window, step, round_fraction,
        links * balance * window.fraction * step * round_fraction,
        rate * round_fraction,
        by_stage,
        _links_by_format(work, used),
    )  # fmt: skip


def zip_stages(work: Workload, placement: Placement) -> list[tuple[StageCost, Counter[int]]]:
    """Return each stage with its peers."""
    return list(zip(work.stages, placement, strict=True))


def fits(stage: StageCost, kind: PeerKind) -> bool:
    """Return whether the memory of a peer holds the stage."""
    return stage.memory[kind.device] <= kind.memory


def peer_rate(stage: StageCost, kind: PeerKind, with_links: bool = True) -> float:
    """Return the microbatches a second of one peer: what its device computes, or what its link carries."""
    rate = kind.flops / stage.flops
    if kind.device == "cuda" and stage.launch_seconds:
        rate = min(rate, 1 / stage.launch_seconds)
    if with_links and stage.sent_bytes:
        rate = min(rate, min(kind.up, kind.down) / stage.sent_bytes)
    return rate


def stage_rate(stage: StageCost, kinds: Sequence[PeerKind], placed: Counter[int], with_links: bool = True) -> float:
    """Return the microbatches a second of all peers of a stage."""
    return sum(count * peer_rate(stage, kinds[number], with_links) for number, count in placed.items())


def place_peers(work: Workload, kinds: Sequence[PeerKind]) -> Placement:
    """Deal the peers to the stages, fast ones first, each to the slowest stage that it can hold.

    Where the manifest has speeds of stages, they fill one stage after the other, the largest first, so that peers of
    like speed serve one stage.
    """
    placement: Placement = tuple(Counter[int]() for _ in work.stages)
    rates = [0.0] * len(work.stages)
    unfilled = _FillingStages(work, [kind for kind in kinds if any(fits(stage, kind) for stage in work.stages)])
    for number in sorted(range(len(kinds)), key=lambda number: -kinds[number].flops):
        possible = [stage for stage in work.stages if fits(stage, kinds[number])]
        for _ in range(kinds[number].count if possible else 0):
            slowest = min(possible, key=lambda stage: (rates[stage.stage], -stage.sent_bytes))
            chosen = unfilled.take(kinds[number], possible) or slowest
            placement[chosen.stage][number] += 1
            rates[chosen.stage] += peer_rate(chosen, kinds[number])
    return placement


class _FillingStages:
    """The stages that still need peers, the largest first, by compute alone; none without speeds of stages."""

    def __init__(self, work: Workload, kinds: Sequence[PeerKind]) -> None:
        self._stages = sorted(work.stages, key=lambda stage: -stage.flops) if work.manifest.pipeline.speeds else []
        self._ideal, self._rate = _ideal_rate(work, kinds), 0.0  # of the first one
        self._left = sum(kind.count for kind in kinds)

    def take(self, kind: PeerKind, possible: Sequence[StageCost]) -> StageCost | None:
        """Return the stage that a peer serves, after all that are as fast or faster; None if any will do."""
        if not self._stages:
            return None
        rate = peer_rate(self._stages[0], kind, with_links=False)
        is_full = self._rate + rate / 2 > self._ideal or self._left < len(self._stages)
        if self._rate and is_full:
            del self._stages[0]
            self._rate = 0.0
        chosen = next((stage for stage in self._stages if stage in possible), None)
        self._left -= 1
        if chosen is not None and chosen is self._stages[0]:
            self._rate += peer_rate(chosen, kind, with_links=False)
        return chosen


def _ideal_rate(work: Workload, kinds: Sequence[PeerKind]) -> float:
    """Return the microbatches a second of these peers if every device always computed."""
    return sum(kind.count * kind.flops for kind in kinds) / sum(stage.flops for stage in work.stages)


def links_fraction(work: Workload, kinds: Sequence[PeerKind], factor: float = 1.0) -> float:
    """Return the share of the compute that the links feed with activations; `factor` scales their bytes."""
    flops = sum(stage.flops for stage in work.stages) / len(work.stages)
    sent = factor * 2 * work.activation_bytes * (len(work.stages) - 1) / len(work.stages)
    total = sum(kind.count * kind.flops for kind in kinds)
    if not total:
        return 0.0
    shares = ((kind, (flops / kind.flops) / (sent / min(kind.up, kind.down)) if sent else 1.0) for kind in kinds)
    return sum(kind.count * kind.flops * min(1.0, share) for kind, share in shares) / total


def _links_by_format(work: Workload, kinds: Sequence[PeerKind]) -> dict[str, float]:
    if not work.is_cut:
        return {}
    model = work.manifest.model
    sizes = {name: size * model.stream_width for name, size in FORMATS.items()}
    own = sizes[work.manifest.pipeline.activations]
    sizes |= {name: FORMATS[base] * model.width / SUBSPACE_PART for name, base in SUBSPACE_FORMATS.items()}
    return {name: links_fraction(work, kinds, size / own) for name, size in sizes.items()}


def fill_fraction(work: Workload) -> float:
    """Return the share of a step of equal peers that is left after filling and draining the pipeline."""
    return work.step_microbatches / (work.step_microbatches + len(work.stages) - 1)


def step_fraction(work: Workload, kinds: Sequence[PeerKind], placement: Placement) -> float:
    """Return the share of steps that is left after filling and draining the pipeline, by the speeds of the peers.

    At the end of its step a peer waits for gradients on their way, some of them at the slowest peer. Measured up to
    `SLOWEST` times the pace of the fastest peer; slower ones count as these. Peers with the whole model never wait.
    """
    if not work.is_cut:
        return 1.0
    rates = [
        (peer_rate(stage, kinds[number]), count)
        for stage, placed in zip_stages(work, placement)
        for number, count in placed.items()
    ]
    if not rates:
        return 1.0
    longest = 1 / max(min(rates)[0], max(rates)[0] / SLOWEST)
    fractions = 0.0
    for rate, count in rates:
        step, wait = work.step_microbatches / rate, (len(work.stages) - 1) / rate
        fractions += rate * count * step / (step + wait + SLOWEST_WAIT * max(0.0, longest - 1 / rate))
    return fractions / sum(rate * count for rate, count in rates)


def speeds_alike(work: Workload, kinds: Sequence[PeerKind]) -> tuple[tuple[float, ...], float]:
    """Return `pipeline.speeds` with which as many peers of like speed serve each stage, and the share of the ideal.

    The share is what layers leave, which are whole: stages by their speed, over stages as fast as the speeds together.
    """
    ordered = sorted(kind.flops for kind in kinds for _ in range(kind.count))
    count, stages = len(ordered), len(work.stages)
    if count < stages:
        return (), 0.0
    groups = [sum(ordered[count * stage // stages : count * (stage + 1) // stages]) for stage in range(stages)]
    layers, dealt = sum(stage.layers for stage in work.stages), [1] * stages
    for _ in range(layers - stages):
        dealt[min(range(stages), key=lambda stage: (dealt[stage] + 1) / groups[stage])] += 1
    share = min(group / part for group, part in zip(groups, dealt, strict=True)) / (sum(groups) / layers)
    return tuple(float(f"{group / groups[0]:.2g}") for group in groups), share


def window_of(work: Workload, kinds: Sequence[PeerKind], placement: Placement, rate: float) -> Window:
    """Return how far the microbatches on their way keep all peers busy at `rate` microbatches a second."""
    owners = sum(placed.total() for placed in placement)
    if not work.is_cut or not owners:
        return Window(1.0, 0.0, 0.0, 0, False, False)
    held = min(stage.held * placed.total() for stage, placed in zip_stages(work, placement))
    total = min(owners * work.manifest.pipeline.in_flight, held)
    mean = _mean_over_peers(kinds, placement)
    stages = len(work.stages)
    on_the_way = 2 * stages * mean(lambda kind: kind.rtt / 1000)
    on_the_way += 2 * (stages - 1) * mean(lambda kind: work.activation_bytes / kind.up)
    busy = owners + rate * on_the_way
    is_unequal = has_unequal_stage(work, kinds, placement)
    fraction = window_fraction(total / busy, is_unequal)
    advised = max(1, min(4096, math.ceil(GOOD_WINDOW * busy / owners)))
    is_limited = held < owners * work.manifest.pipeline.in_flight and held < GOOD_WINDOW * busy
    return Window(fraction, total, busy, advised, is_limited, is_unequal and total / busy > TOO_LARGE_POINTS[0][0])


def window_fraction(filling: float, is_unequal: bool) -> float:
    """Return the fraction of ideal by the microbatches in flight for each one that can be busy or travel."""
    if filling < WINDOW_POINTS[0][0]:
        return WINDOW_POINTS[0][1] * filling
    too_large = _interpolate(TOO_LARGE_POINTS, filling) if is_unequal else 1.0
    return min(_interpolate(WINDOW_POINTS, filling), too_large)


def _interpolate(points: Sequence[tuple[float, float]], place: float) -> float:
    """Interpolate on a logarithmic axis; constant outside of the points."""
    place = min(max(place, points[0][0]), points[-1][0])
    (left, low), (right, high) = next(
        (before, after) for before, after in zip(points, points[1:], strict=False) if place <= after[0]
    )
    return low + (high - low) * math.log(place / left) / math.log(right / left)


def has_unequal_stage(work: Workload, kinds: Sequence[PeerKind], placement: Placement) -> bool:
    """Return whether a stage has peers of which one is far faster than another."""
    return any(_are_unequal(stage, kinds, placed) for stage, placed in zip_stages(work, placement))


def _are_unequal(stage: StageCost, kinds: Sequence[PeerKind], placed: Counter[int]) -> bool:
    rates = [peer_rate(stage, kinds[number]) for number, count in placed.items() if count]
    return bool(rates) and max(rates) >= UNEQUAL * min(rates)


def _mean_over_peers(kinds: Sequence[PeerKind], placement: Placement) -> Callable[[Callable[[PeerKind], float]], float]:
    counts = sum(placement, Counter[int]())
    return lambda value: sum(count * value(kinds[number]) for number, count in counts.items()) / counts.total()


def _stage_prediction(
    work: Workload, kinds: Sequence[PeerKind], stage: StageCost, placed: Counter[int],
    rates: tuple[float, float, float],
) -> StagePrediction:  # fmt: skip
    """Predict a stage; `rates` are those by compute, with links, and of the whole run."""
    compute, linked, rate = rates
    count = placed.total()
    if not rate:
        return StagePrediction(count, compute, linked, 0.0, 0.0)
    seconds = work.steps * work.step_microbatches * count / rate
    used = {number: many * peer_rate(stage, kinds[number]) for number, many in placed.items()}
    fractions = sum(
        weight * round_fraction(work, stage, kinds[number], count, (seconds, rate * weight / placed[number] / linked))
        for number, weight in used.items()
    )
    return StagePrediction(count, compute, linked, seconds, fractions / linked)


def round_fraction(work: Workload, stage: StageCost, kind: PeerKind, count: int, pace: tuple[float, float]) -> float:
    """Return the share of a round for which a peer trains.

    Args:
        count: peers of the stage.
        pace: seconds of training in a round, and microbatches a second of this peer.
    """
    seconds, rate = pace
    if count < 2:
        return 1.0
    message = round_bytes(work, stage, count)
    link = min(kind.up, kind.down)
    computing, held = core_seconds(stage, kind)
    exchange = message / link + EXCHANGE_ROUND_TRIPS * kind.rtt / 1000 + computing
    hidden = seconds * min(1.0, work.ahead / work.steps)
    carried = (rate * seconds * stage.sent_bytes + message) / link
    return seconds / max(seconds + held + max(0.0, exchange - hidden), carried, computing)


def core_seconds(stage: StageCost, kind: PeerKind) -> tuple[float, float]:
    """Return how long the cores of a peer compute for a round, and how long its trainer is held; 0 if unknown."""
    if kind.cores is None:
        return 0.0, 0.0
    held = HELD_SECONDS_PER_VALUE * stage.parameters / min(1.0, kind.cores)
    return CORE_SECONDS_PER_VALUE * stage.parameters / kind.cores, held


def round_bytes(work: Workload, stage: StageCost, count: int) -> float:
    """Return the bytes that a peer uploads in a round of `count` peers, and about as many that it downloads."""
    topology = work.topology
    if topology.reduces_parts:
        return (Butterfly.reducers_per_part + 1) * stage.message_bytes * (count - 1) / count
    return stage.message_bytes * topology.partners(count)

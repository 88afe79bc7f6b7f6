"""How much of its peers' compute a pipeline uses over real connections, and what a microbatch costs their daemons.

    python benchmarks/pipeline.py [--unit 1.0] [--seconds 40] [--json]
        [--parts routing everybody local uneven dealt flow hop shaped ratio]

Each peer is a process with the product's transport, directory, calls, activation memory and pipeline; its trainer
sleeps for a quarter of 1 / rate in a forward pass and for three quarters in a backward pass, and writes a result of the
right size. Four stages; rates 1:2:4:8 times `--unit` microbatches a second in each; activations of 64 KiB.

- `routing`: one owner with 64 microbatches in flight, no steps: `fraction_of_ideal` of the sum of a stage's rates, and
  `shares`, the work of each peer over its share of the speed. Then the fastest peer of stage 1 becomes ten times
  slower: `straggler_fraction` of the new ideal from the 10th second on.
- `everybody`: the same with 16 owners, each with four microbatches in flight.
- `local`: `fraction` of the ideal with steps of 64 microbatches, two equal peers at each stage, and 16 microbatches in
  flight of each: as many together as the open steps of a stage take.
- `uneven`: the same at rates 1:2:4:8, with four in flight of each of 16 peers.
- `dealt`: the same peers, those of one speed at one stage, and 24 layers dealt by speed.
- `hop`: Ask, fetch of 1 MiB, compute slot and Tell of a task without compute, one microbatch in flight.
- `flow`: three stages of one peer each, activations of 4 MiB: `mb_per_second` that the middle peer downloads, with as
  many uploads, and the delays of its event loop and of small calls meanwhile and before (`idle`).
- `shaped`: two equal peers at each stage, each behind a link of 100 Mbit/s, with a round trip of 50 ms: the fraction of
  the ideal as `measured` and as `murmur plan` has `predicted` it. With eight microbatches in flight of each peer,
  `few` with two, and `thin` on links of 10 Mbit/s, which are too slow. Needs root, iproute2, nftables and
  iptables.
- `ratio`: `local.ratio`, the loss of a pipeline over that of full replicas at equal tokens, by the simulator (real
  gradients, virtual time; see `benchmarks/pipeline_local.py`): processes on two cores would take an hour.

Exit code 1 where a figure misses its target; the reason is printed with it.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pipeline_local import PIPELINE, REPLICAS, measure
from benchmarks.pipelining.dealt_layers import dealt
from benchmarks.pipelining.shaped import measure_window, predicted_fraction
from benchmarks.pipelining.swarm import Setting, Swarm, Window

STAGES = 4
SPEEDS = (1.0, 2.0, 4.0, 8.0)
DEALT_LAYERS = 24
ACTIVATION_BYTES = 64 * 1024
HOP_BYTES = 1024 * 1024
INSTANT = 1e4  # microbatches a second of a trainer that computes nothing
WARM_SECONDS = 20.0
STRAGGLER_SECONDS = 10.0  # until routes must have changed
IDLE_SECONDS = 6.0
HOP_SECONDS = 15.0
FLOW_BYTES, FLOW_RATE, FLOW_PEERS = 4 * 1024 * 1024, 7.0, 3  # 56 MiB/s through the middle peer
FLOW_TARGET, MAX_LOOP_DELAY_MS = 50.0, 500.0  # of the shortest heartbeat of our configurations
STRAGGLER = STAGES * (len(SPEEDS) - 1) + 1  # the fastest peer of stage 1
SLOWER = 10
BUSY_CORES = 0.8  # above this share of all cores, the processor may be the limit

SHAPED_TOLERANCE = 0.15
# Mbit/s, bytes of an activation, microbatches a second of a peer, microbatches in flight of each.
SHAPED: Mapping[str, tuple[int, int, float, int]] = {
    "full": (100, 256 * 1024, 2.0, 8),
    "few": (100, 256 * 1024, 2.0, 2),
    "thin": (10, 256 * 1024, 4.0, 8),
}
RATIO_STEPS, RATIO_SEEDS, MAX_RATIO = 60, 3, 1.01

NOT_MEASURED = {"exact": "real trainers: python benchmarks/exact.py"}

Figures = dict[str, Any]


def speeds(unit: float) -> tuple[tuple[float, ...], ...]:
    return (tuple(unit * speed for speed in SPEEDS),) * STAGES


def costs(window: Window, idle: float) -> Figures:
    """Return what a microbatch costs. `idle`: processor seconds a second without microbatches."""
    busy = max(0.0, window.cpu_seconds - idle * window.seconds)
    return {
        "cpu_seconds_per_microbatch": window.per_microbatch(busy),
        "daemon_cpu_seconds_per_microbatch": window.per_microbatch(busy) / STAGES,
        "p2pd_share": window.p2pd_share,
        "cores": window.cpu_seconds / window.seconds,
        "bytes_per_microbatch": window.per_microbatch(window.bytes_sent),
        "direct_share": window.direct_share,
        "answers_per_microbatch": {kind: window.per_microbatch(count) for kind, count in window.answers.items()},
        "dropped": window.dropped,
    }


def shares(swarm: Swarm, window: Window) -> list[float]:
    """Return the work of each peer over its share of its stage's speed."""
    ratios = []
    for (stage, rate), computed in zip(swarm.places, window.computed, strict=True):
        total = sum(count for (other, _), count in zip(swarm.places, window.computed, strict=True) if other == stage)
        ratios.append(computed / max(1, total) * sum(swarm.setting.rates[stage]) / rate)
    return ratios


def measure_routing(unit: float, seconds: float) -> Figures:
    """Measure one owner whose microbatches keep all peers busy, then a straggler."""
    setting = Setting(speeds(unit), owners=1, in_flight=64, activation_bytes=ACTIVATION_BYTES)
    with Swarm(setting) as swarm:
        idle = swarm.idle_cpu(IDLE_SECONDS)
        swarm.start()
        swarm.measure(WARM_SECONDS)
        window = swarm.measure(seconds)
        rates = setting.rates[1]
        swarm.slow_down(STRAGGLER, rates[-1] / SLOWER)
        first, later = swarm.measure(STRAGGLER_SECONDS), swarm.measure(seconds)
    new_ideal = sum(rates) - rates[-1] * (1 - 1 / SLOWER)
    return {
        "fraction_of_ideal": window.rate / setting.ideal,
        "shares": shares(swarm, window),
        "straggler_fraction": later.rate / new_ideal,
        "straggler_first_seconds": first.rate / new_ideal,
        **costs(window, idle),
    }


def measure_everybody(unit: float, seconds: float) -> Figures:
    """Measure peers that all own a few microbatches."""
    owners = STAGES * len(SPEEDS)
    setting = Setting(speeds(unit), owners=owners, in_flight=64 // owners, activation_bytes=ACTIVATION_BYTES)
    with Swarm(setting) as swarm:
        idle = swarm.idle_cpu(IDLE_SECONDS)
        swarm.start()
        swarm.measure(WARM_SECONDS)
        window = swarm.measure(seconds)
    return {"fraction_of_ideal": window.rate / setting.ideal, "shares": shares(swarm, window), **costs(window, idle)}


def measure_gate(rates: tuple[tuple[float, ...], ...], in_flight: int, seconds: float) -> Figures:
    """Measure steps of 64 microbatches. `in_flight`: of each owner."""
    owners = len(rates) * len(rates[0])
    setting = Setting(rates, owners=owners, in_flight=in_flight, activation_bytes=ACTIVATION_BYTES, step=64)
    with Swarm(setting) as swarm:
        idle = swarm.idle_cpu(IDLE_SECONDS)
        swarm.start()
        swarm.measure(2 * WARM_SECONDS)
        window = swarm.measure(2 * seconds)
    figures = {"fraction": window.rate / setting.ideal, "steps": window.steps, "shares": shares(swarm, window)}
    return figures | costs(window, idle)


def measure_dealt(unit: float, seconds: float) -> Figures:
    """Measure unequal peers whose stages have layers by their speed; `fraction` is that of all of their compute."""
    peers = [unit * speed for speed in SPEEDS * STAGES]
    rates = dealt(peers, DEALT_LAYERS)
    figures = measure_gate(rates, 4, seconds)
    return figures | {"fraction": figures["fraction"] * min(map(sum, rates)) / (sum(peers) / STAGES)}


def measure_flow(seconds: float) -> Figures:
    """Measure a peer through which large activations pass, and how punctual it stays."""
    setting = Setting(((FLOW_RATE,),) * FLOW_PEERS, owners=1, in_flight=8, activation_bytes=FLOW_BYTES)
    with Swarm(setting) as swarm:
        swarm.start_watch()
        swarm.idle_cpu(IDLE_SECONDS)
        idle = swarm.watched()[1]
        swarm.start()
        swarm.measure(WARM_SECONDS)
        swarm.start_watch()
        window = swarm.measure(seconds)
        delays = swarm.watched()[1]
    return {
        "mb_per_second": window.fetched[1] / window.seconds / 1e6,
        **delays,
        **{f"idle.{name}": value for name, value in idle.items()},
        "cores": window.cpu_seconds / window.seconds,
        "answers_per_microbatch": {kind: window.per_microbatch(count) for kind, count in window.answers.items()},
    }


def measure_hop() -> Figures:
    """Measure tasks without compute, one after another."""
    rates = ((INSTANT,),) * STAGES
    with Swarm(Setting(rates, owners=1, in_flight=1, activation_bytes=HOP_BYTES)) as swarm:
        swarm.start()
        window = swarm.measure(HOP_SECONDS)
        hops: list[float] = swarm.team.workers[0].request(hops=True)["hops"]
    settled = hops[len(hops) // 4 :]  # without those before direct connections
    tenths = statistics.quantiles(settled, n=10)
    return {
        **costs(window, idle=0.0),
        "hop_ms": 1000 * statistics.median(settled),
        "hop_ms_tenths": [1000 * tenths[0], 1000 * tenths[-1]],
        "hops": len(settled),
    }


def measure_shaped(unit: float, seconds: float) -> Figures:
    """Measure pipelines on limited links, and predict them; the first one gives the figures without a name."""
    figures: Figures = {}
    for name, (mbit, activation_bytes, rate, in_flight) in SHAPED.items():
        rates = ((unit * rate,) * 2,) * STAGES
        setting = Setting(rates, owners=2 * STAGES, in_flight=in_flight, activation_bytes=activation_bytes)
        window = measure_window(setting, mbit, WARM_SECONDS, seconds)
        found: Figures = {"measured": window.rate / setting.ideal, "predicted": predicted_fraction(setting, mbit)}
        found["cores"] = window.cpu_seconds / window.seconds
        sys.stderr.write(f"shaped, {name}: {json.dumps(found)}\n")
        figures |= {name: found} if figures else found
    return figures


def measure_ratio() -> Figures:
    """Return the loss of a pipeline over that of full replicas, of each seed and their mean."""
    names = (REPLICAS, PIPELINE)
    replicas, pipelines = (measure([name], RATIO_STEPS, RATIO_SEEDS)[name] for name in names)
    ratios = [cut["loss"] / whole["loss"] for cut, whole in zip(pipelines, replicas, strict=True)]
    return {"ratio": statistics.fmean(ratios), "ratios": ratios}


PARTS: Mapping[str, Callable[[float, float], Figures]] = {
    "routing": measure_routing,
    "everybody": measure_everybody,
    "local": lambda unit, seconds: measure_gate(((4 * unit, 4 * unit),) * STAGES, 16, seconds),
    "uneven": lambda unit, seconds: measure_gate(speeds(unit), 4, seconds),
    "dealt": measure_dealt,
    "flow": lambda unit, seconds: measure_flow(seconds),
    "hop": lambda unit, seconds: measure_hop(),
    "shaped": measure_shaped,
    "ratio": lambda unit, seconds: measure_ratio(),
}


def missed(report: Mapping[str, Figures]) -> list[str]:
    """Return a line for each figure that misses its target, with the likely reason."""
    lines = []
    targets = (
        ("routing", "fraction_of_ideal", 0.95),
        ("routing", "straggler_fraction", 0.8),
        ("local", "fraction", 0.85),
        ("flow", "mb_per_second", FLOW_TARGET),
    )
    for part, name, least in targets:
        figures = report.get(part)
        if figures is not None and figures.get(name, least) < least:
            lines.append(f"{part}.{name} is {figures[name]:.3f}, not {least}: {reason(figures)}")
    ratios: Sequence[float] = report.get("routing", {}).get("shares", ())
    if any(abs(ratio - 1) > 0.15 for ratio in ratios):
        lines.append(f"routing.shares are {min(ratios):.2f} to {max(ratios):.2f} of speed, not within 15 %")
    flow = report.get("flow", {})
    if flow and (flow["loop_delay_ms"] > MAX_LOOP_DELAY_MS or flow["failed_calls"] or flow["peers_left"]):
        lines.append(f"flow: a heartbeat may be late: {flow['loop_delay_ms']:.0f} ms of delay: {reason(flow)}")
    return [*lines, *missed_predictions(report.get("shaped", {})), *missed_ratio(report.get("local", {}))]


def missed_predictions(shaped: Figures) -> list[str]:
    """Return a line for each prediction that is wrong by more than 15 %."""
    pairs: dict[str, Mapping[str, Any]] = {"shaped": shaped} if shaped else {}
    pairs |= {f"shaped.{name}": found for name, found in shaped.items() if isinstance(found, Mapping)}
    return [
        f"{name}.measured is {found['measured']:.3f}, predicted {found['predicted']:.3f}, not within "
        f"{SHAPED_TOLERANCE:.0%}: the peers used {found['cores']:.2f} of {os.cpu_count()} cores"
        for name, found in pairs.items()
        if abs(found["measured"] / found["predicted"] - 1) > SHAPED_TOLERANCE
    ]


def missed_ratio(local: Figures) -> list[str]:
    ratio = local.get("ratio", 0.0)
    reason = "the pipeline learns less from as many tokens"
    return [f"local.ratio is {ratio:.4f}, not {MAX_RATIO}: {reason}"] if ratio > MAX_RATIO else []


def reason(figures: Figures) -> str:
    """Return what limits a swarm, as far as its figures show."""
    cores = os.cpu_count() or 1
    if figures["cores"] > BUSY_CORES * cores:
        return f"the daemons use {figures['cores']:.2f} of {cores} cores; try a smaller --unit"
    busy = figures["answers_per_microbatch"].get("busy", 0.0)
    if busy > 1:
        return f"peers wait for the end of a step ({busy:.1f} busy answers a microbatch)"
    return f"not the processor ({figures['cores']:.2f} of {cores} cores)"


def table(report: Mapping[str, Figures]) -> str:
    lines = ["| part | figure | value |", "|---|---|---:|"]
    for part, figures in report.items():
        lines += [f"| {part} | {name} | {shown(value)} |" for name, value in figures.items()]
    return "\n".join(lines)


def shown(value: object) -> str:
    """Return a figure for the table; of many, the least and the largest."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return f"{min(value):.2f} to {max(value):.2f}"
    return f"{value:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--unit", type=float, default=1.0, help="microbatches a second of the slowest peers")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    report: dict[str, Figures] = {}
    for part in words.parts:
        figures = PARTS[part](words.unit, words.seconds)
        sys.stderr.write(f"{part}: {json.dumps(figures)}\n")
        report.setdefault("local" if part == "ratio" else part, {}).update(figures)
    misses = missed(report)
    print(
        json.dumps({**report, "missed": misses, "not_measured": NOT_MEASURED}, indent=1)
        if words.json
        else table(report)
    )
    sys.stderr.writelines(f"not measured: {name}: {why}\n" for name, why in NOT_MEASURED.items())
    sys.stderr.writelines(f"missed: {line}\n" for line in misses)
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())

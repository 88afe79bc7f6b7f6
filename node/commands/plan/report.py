"""The tables, the warnings and the JSON of a plan: what limits it, why, and the key to change."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.commands.plan.arithmetic import (
    FORMATS,
    GOOD_WINDOW,
    SUBSPACE_FORMATS,
    SUBSPACE_PART,
    Prediction,
    StagePrediction,
    Workload,
    fill_fraction,
    fits,
    has_unequal_stage,
    peer_rate,
    round_bytes,
    speeds_alike,
    zip_stages,
)
from node.commands.plan.peers import PeerKind
from node.monitoring.logs import sanitize
from node.units import format_bytes, format_count, format_duration, format_plural

POOR = 0.5  # below this, a limit is worth a warning, and `murmur host` and `murmur join` warn of the whole
GOOD_WINDOW_FRACTION, GOOD_STEP_FRACTION, GOOD_BALANCE = 0.9, 0.8, 0.7
GOOD_STEP_STAGES = 16  # microbatches for each stage before the last, which give 0.94
LIKE_STEP_FRACTION = 0.9  # of steps of 64 where all peers have stages by their speed (docs/results/pipelines.md)


def warnings_of(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> list[str]:
    """Return one line for each fault of the layout; none if it can pay."""
    about_rounds = [_about_round(work, kinds, found)] if found.rate and found.round < POOR else []
    if not work.is_cut:
        return [*_about_memory(work, kinds), *about_rounds]
    if missing := list(_about_missing_peers(found)):
        return [*_about_memory(work, kinds), *missing]
    return [
        *_about_memory(work, kinds),
        *_about_links(work, found),
        *_about_stages(found),
        *_about_slow_peers(work, kinds, found),
        *_about_window(work, found),
        *_about_step(work),
        *_about_unequal_stages(work, kinds, found),
        *_about_waiting(work),
        *about_rounds,
    ]


def _about_memory(work: Workload, kinds: Sequence[PeerKind]) -> Iterator[str]:
    for kind in kinds:
        least = min(stage.memory[kind.device] for stage in work.stages)
        if least > kind.memory:
            what = "the smallest stage" if work.is_cut else "the model"
            yield (
                f"{kind.name}: {what} needs {format_bytes(least)} of its {format_bytes(kind.memory)}, so these peers "
                "take no part; use more stages or a smaller model"
            )


def _about_missing_peers(found: Prediction) -> Iterator[str]:
    empty = [number for number, placed in enumerate(found.placement) if not placed.total()]
    if empty:
        stages = f"stage {empty[0]} has" if len(empty) == 1 else f"stages {format_stages(empty)} have"
        yield f"{stages} no peer, and a run needs all stages; name more peers, or use fewer stages"


def _about_links(work: Workload, found: Prediction) -> Iterator[str]:
    if found.links >= POOR:
        return
    model, table = work.manifest.model, work.manifest.pipeline
    better = [name for name in found.links_by_format if found.links_by_format[name] > 1.5 * found.links]
    formats = [f'pipeline.activations = "{name}"' for name in FORMATS if name in better][-1:]
    subspaces = [f"model.subspace = {model.width // SUBSPACE_PART}" for name in SUBSPACE_FORMATS if name in better][:1]
    remedy = f"write {' or '.join((*formats, *subspaces))}, use " if better else "use "
    yield (
        f"links feed {found.links:.2f} of the compute with activations in {table.activations}; {remedy}"
        "fewer stages, a wider model or faster links"
    )


def _about_stages(found: Prediction) -> Iterator[str]:
    rates = [stage.rate for stage in found.by_stage]
    slowest = rates.index(min(rates))
    if found.stages < GOOD_BALANCE:
        yield (
            f"stage {slowest} limits the others to {found.stages:.2f}; more peers there (`murmur join --stage "
            f"{slowest}`) help most"
        )
    alone = [number for number, placed in enumerate(found.placement) if placed.total() == 1]
    if alone:
        stages = f"stage {alone[0]} has" if len(alone) == 1 else f"stages {format_stages(alone)} each have"
        yield f"{stages} one peer, and the run stands still while it is away; four at each stage are safe"


def _about_slow_peers(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> Iterator[str]:
    """Name the peers that take longer for a microbatch than the fastest of their stage for a step."""
    slow: dict[int, tuple[float, float]] = {}
    for stage, placed in zip_stages(work, found.placement):
        seconds = {number: 1 / peer_rate(stage, kinds[number]) for number in placed}
        step_seconds = work.step_microbatches * min(seconds.values())
        slow |= {number: (each, step_seconds) for number, each in seconds.items() if each > step_seconds}
    for number, (each, step_seconds) in slow.items():
        yield (
            f"{kinds[number].name}: a microbatch takes {format_duration(each)}, and a step of the fastest peer of the "
            f"stage {format_duration(step_seconds)}: its step waits for every microbatch that goes this way; larger "
            "steps, or run these peers elsewhere"
        )


def _about_window(work: Workload, found: Prediction) -> Iterator[str]:
    window, table = found.window, work.manifest.pipeline
    if window.is_too_large:
        yield (
            f"pipeline.in_flight = {table.in_flight} is too large for peers of unequal speed, whose steps wait for "
            f"microbatches in long queues; write about {window.advised}"
        )
    elif window.fraction < GOOD_WINDOW_FRACTION and window.is_limited_by_memory:
        needed = math.ceil(table.memory * GOOD_WINDOW * window.needed / window.total / 2**26) * 2**26
        yield (
            f"pipeline.memory holds {window.total:.0f} microbatches of the slowest stage, and "
            f"{GOOD_WINDOW * window.needed:.0f} keep all peers busy; write about {needed}"
        )
    elif window.fraction < GOOD_WINDOW_FRACTION:
        yield (
            f"pipeline.in_flight = {table.in_flight} is too small for these peers and round trips; write about "
            f"{window.advised}"
        )


def _about_step(work: Workload) -> Iterator[str]:
    left = fill_fraction(work)
    if left < GOOD_STEP_FRACTION:
        model, table = work.manifest.model, work.manifest.pipeline
        advised = GOOD_STEP_STAGES * (len(work.stages) - 1) * table.microbatch * model.context
        yield (
            f"{1 - left:.0%} of a step ({work.step_microbatches} x pipeline.microbatch) goes into filling and "
            f"draining the pipeline; write train.batch_tokens = {advised}, or a smaller pipeline.microbatch"
        )


def _about_unequal_stages(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> Iterator[str]:
    """Name the speeds of stages for peers of like speed, where they gain more than whole layers cost."""
    if work.manifest.pipeline.speeds or not has_unequal_stage(work, kinds, found.placement):
        return
    used = [kind for number, kind in enumerate(kinds) if any(placed[number] for placed in found.placement)]
    speeds, share = speeds_alike(work, used)
    now, then = found.stages * found.step, share * LIKE_STEP_FRACTION
    if then > now:
        yield (
            f"fast peers wait for slow ones at the end of each step ({now:.2f} of the compute is left); write "
            f"pipeline.speeds = {json.dumps(speeds)}, and peers of like speed serve one stage, with layers by their "
            f"speed ({then:.2f}): `murmur join --stage`"
        )


def _about_waiting(work: Workload) -> Iterator[str]:
    if not work.ahead:
        yield (
            f"peers of {work.manifest.method.recipe!r} wait for their rounds, and a stage that waits stops the others; "
            "choose a recipe that trains on, such as frugal, or set method.schedule.ahead"
        )


def _about_round(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> str:
    stage, placed = min(
        zip_stages(work, found.placement), key=lambda pair: found.by_stage[pair[0].stage].round_fraction
    )
    predicted = found.by_stage[stage.stage]
    sent = format_bytes(round_bytes(work, stage, placed.total()))
    slowest = min((kinds[number] for number in placed), key=lambda kind: min(kind.up, kind.down))
    return (
        f"a round trains for {format_duration(predicted.round_seconds)} and sends {sent}, which {slowest.name} uploads "
        f"at {format_bytes(slowest.up)}/s; raise method.schedule.inner_steps or train.batch_tokens, or choose a recipe "
        "with smaller messages (`murmur recipes`)"
    )


def format_stages(stages: Sequence[int]) -> str:
    """Return stage numbers with ranges: 0-2, 5."""
    ranges: list[list[int]] = []
    for stage in stages:
        if ranges and stage == ranges[-1][-1] + 1:
            ranges[-1][1:] = [stage]
        else:
            ranges.append([stage])
    return ", ".join("-".join(map(str, ends)) for ends in ranges) or "none"


def factors(found: Prediction) -> dict[str, float]:
    """Return the factors of the prediction by the names of the limits."""
    return {
        "links": found.links,
        "stages": found.stages,
        "window": found.window.fraction,
        "step": found.step,
        "round": found.round,
    }


def print_plan(work: Workload, kinds: Sequence[PeerKind], found: Prediction, console: Console) -> None:
    """Print the tables and the warnings."""
    console.print(Text(_headline(work, kinds)))
    console.print(_limits_table(work, found))
    if (memory := work.rollout_memory) is not None:
        console.print(Text(f"a rollout peer (`murmur join --role rollout`) takes {format_bytes(memory)} of memory"))
    if work.is_cut:
        console.print(_stages_table(work, found))
        console.print(Text(_other_formats(found)))
    console.print(_peers_table(work, kinds, found))
    for line in warnings_of(work, kinds, found):
        console.print(Text(f"warning: {sanitize(line)}", style="yellow"))


def _headline(work: Workload, kinds: Sequence[PeerKind]) -> str:
    manifest = work.manifest
    cut = f"{len(work.stages)} stages" if work.is_cut else "every peer holds the whole model"
    peers = format_plural(sum(kind.count for kind in kinds), "peer")
    parameters = format_count(work.parameters)
    return sanitize(f"{manifest.run.name}: {parameters} parameters, {cut}, {manifest.method.recipe}; {peers}")


def _new_table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="right" if number else "left")
    return table


def _limits_table(work: Workload, found: Prediction) -> Table:
    table = _new_table("limit", "of ideal", "why")
    table.columns[-1].justify = "left"
    for name, fraction in factors(found).items():
        if work.is_cut or name == "round":
            table.add_row(name, f"{fraction:.2f}", _reason(name, work, found))
    table.add_row("all", f"{found.fraction:.2f}", "of the compute of all peers that take part", style="bold")
    return table


def _reason(name: str, work: Workload, found: Prediction) -> str:
    window, rounds = found.window, found.by_stage
    rates = [stage.rate for stage in rounds]
    slowest = rates.index(min(rates))
    texts = {
        "links": f"{2 * (len(work.stages) - 1) / len(work.stages):.2g} activations of "
        f"{format_bytes(work.activation_bytes)} for each microbatch and stage",
        "stages": f"stage {slowest} is the slowest: {rates[slowest]:.3g} microbatches a second",
        "window": f"{window.total:.0f} microbatches under way; {window.needed:.0f} peers and transfers",
        "step": f"{work.step_microbatches} microbatches fill and drain {len(work.stages)} stages",
        "round": f"message of {format_bytes(max(stage.message_bytes for stage in work.stages))} in "
        f"{format_duration(max(stage.round_seconds for stage in rounds))} of training",
    }
    return texts[name]


def _stages_table(work: Workload, found: Prediction) -> Table:
    table = _new_table("stage", "layers", "params", "peers", "FLOP", "upload", "compute", "linked", "message")
    rows = [
        (
            str(stage.layers), format_count(stage.parameters), str(predicted.peers), _format_flops(stage.flops),
            format_bytes(stage.sent_bytes), *_seconds_each(predicted), format_bytes(stage.message_bytes),
        )
        for stage, predicted in zip(work.stages, found.by_stage, strict=True)
    ]  # fmt: skip
    for row, numbers in itertools.groupby(range(len(rows)), key=lambda number: rows[number]):
        table.add_row(format_stages(list(numbers)), *row)
    return table


def _format_flops(flops: float) -> str:
    return f"{flops / 1e12:.1f}T" if flops >= 1e12 else format_count(flops)


def _seconds_each(predicted: StagePrediction) -> tuple[str, str]:
    """Return the seconds in which a stage finishes a microbatch, by compute alone and with its links."""
    rates = (predicted.compute_rate, predicted.rate)
    compute, linked = (format_duration(1 / rate) if rate else "-" for rate in rates)
    return compute, linked


def _other_formats(found: Prediction) -> str:
    shares = (f"{name} {fraction:.2f}" for name, fraction in found.links_by_format.items())
    return f"links with other activations: {', '.join(shares)}"


def _peers_table(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> Table:
    table = _new_table("peer", "count", "stages", "compute", "upload", "round", "memory", "needs")
    for number, kind in enumerate(kinds):
        fields = peer_values(work, kind, number, found)
        table.add_row(
            sanitize(kind.name), str(kind.count), format_stages(fields["stages"]),
            *(
                format_duration(fields[name]) if fields[name] else "-"
                for name in ("compute_seconds", "upload_seconds", "round_upload_seconds")
            ),
            format_bytes(kind.memory), format_bytes(fields["needed_memory"]),
        )  # fmt: skip
    return table


def peer_values(work: Workload, kind: PeerKind, number: int, found: Prediction) -> dict[str, Any]:
    """Return what a microbatch and a round cost a peer of this kind, at the most costly of its stages."""
    placed = [(stage, counts.total()) for stage, counts in zip_stages(work, found.placement) if counts[number]]
    held = [stage for stage, _ in placed] or [min(work.stages, key=lambda stage: stage.memory[kind.device])]
    return {
        "name": kind.name,
        "count": kind.count,
        "fits": [stage.stage for stage in work.stages if fits(stage, kind)],
        "stages": [stage.stage for stage, _ in placed],
        "compute_seconds": max((1 / peer_rate(stage, kind, with_links=False) for stage, _ in placed), default=None),
        "upload_bytes": max((stage.sent_bytes for stage, _ in placed), default=None),
        "upload_seconds": max((stage.sent_bytes / kind.up for stage, _ in placed), default=None),
        "round_bytes": max((round_bytes(work, stage, count) for stage, count in placed), default=None),
        "round_upload_seconds": max((round_bytes(work, *pair) / kind.up for pair in placed), default=None),
        "memory": kind.memory,
        "needed_memory": max(stage.memory[kind.device] for stage in held),
    }


def plan_values(work: Workload, kinds: Sequence[PeerKind], found: Prediction) -> dict[str, Any]:
    """Return the prediction as JSON values; times are in seconds, sizes in bytes."""
    return {
        "run": work.manifest.run.name,
        "fraction_of_ideal": found.fraction,
        "limits": factors(found),
        "microbatches_per_second": found.rate,
        "links_by_format": dict(found.links_by_format),
        "window": {
            "in_flight": found.window.total, "needed": found.window.needed, "advised_in_flight": found.window.advised,
        },
        "stages": [
            {
                "stage": stage.stage, "layers": stage.layers, "parameters": stage.parameters,
                "peers": predicted.peers, "flops": stage.flops, "upload_bytes": stage.sent_bytes,
                "compute_rate": predicted.compute_rate, "rate": predicted.rate,
                "message_bytes": stage.message_bytes, "round_seconds": predicted.round_seconds,
                "round_fraction": predicted.round_fraction, "memory": stage.memory,
            }
            for stage, predicted in zip(work.stages, found.by_stage, strict=True)
        ],
        "peers": [peer_values(work, kind, number, found) for number, kind in enumerate(kinds)],
        "warnings": warnings_of(work, kinds, found),
        **({} if (memory := work.rollout_memory) is None else {"rollout_peer_memory": memory}),
    }  # fmt: skip

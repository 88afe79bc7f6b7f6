"""Warnings about a layout: why it cannot pay, and the key to change."""

import math
from collections.abc import Iterator, Sequence

from node.commands.plan.arithmetic import (
    FORMATS,
    GOOD_WINDOW,
    SUBSPACE_FORMATS,
    SUBSPACE_PART,
    Prediction,
    peer_rate,
    round_bytes,
    zip_stages,
)
from node.commands.plan.peers import PeerKind
from node.commands.plan.workload import Workload
from node.units import format_bytes

POOR = 0.5  # below this, a limit is worth a warning, and `murmur host` and `murmur join` warn of the whole
GOOD_WINDOW_FRACTION, GOOD_STEP_FRACTION, GOOD_BALANCE = 0.9, 0.8, 0.7
GOOD_STEP_STAGES = 16  # so many microbatches for each stage before the last: 0.94


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
        *_about_step(work, found),
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
            f"{kinds[number].name}: a microbatch takes {format_seconds(each)}, and a step of the fastest peer of the "
            f"stage {format_seconds(step_seconds)}: its step waits for every microbatch that goes this way; larger "
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


def _about_step(work: Workload, found: Prediction) -> Iterator[str]:
    if found.step < GOOD_STEP_FRACTION:
        model, table = work.manifest.model, work.manifest.pipeline
        advised = GOOD_STEP_STAGES * (len(work.stages) - 1) * table.microbatch * model.context
        yield (
            f"{1 - found.step:.0%} of a step ({work.step_microbatches} x pipeline.microbatch) goes into filling and "
            f"draining the pipeline; write train.batch_tokens = {advised}, or a smaller pipeline.microbatch"
        )


def _about_waiting(work: Workload) -> Iterator[str]:
    if not work.method.schedule.ahead:
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
        f"a round trains for {format_seconds(predicted.round_seconds)} and sends {sent}, which {slowest.name} uploads "
        f"at {format_bytes(slowest.up)}/s; raise method.schedule.inner_steps or train.batch_tokens, or choose a recipe "
        "with smaller messages (`murmur recipes`)"
    )


def format_seconds(seconds: float) -> str:
    """Return seconds with a unit: 0.1234 gives `123 ms`."""
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.3g} ms"


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

"""The prediction for people, at most as wide as the terminal, and for programs."""

import itertools
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.commands.plan.advice import factors, format_seconds, format_stages, warnings_of
from node.commands.plan.arithmetic import (
    Prediction,
    StagePrediction,
    fits,
    peer_rate,
    round_bytes,
    zip_stages,
)
from node.commands.plan.peers import PeerKind
from node.commands.plan.workload import Workload
from node.model import shape_table
from node.monitoring.logs import sanitize
from node.units import format_bytes, format_count, format_plural


def print_plan(work: Workload, kinds: Sequence[PeerKind], found: Prediction, console: Console) -> None:
    """Print the tables and the warnings."""
    console.print(Text(_headline(work, kinds)))
    console.print(_limits_table(work, found))
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
    parameters = format_count(shape_table(manifest.model).numel)
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
        f"{format_seconds(max(stage.round_seconds for stage in rounds))} of training",
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
    compute, linked = (format_seconds(1 / rate) if rate else "-" for rate in rates)
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
                format_seconds(fields[name]) if fields[name] else "-"
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
    }  # fmt: skip

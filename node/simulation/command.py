"""`murmur sim`: parse the command line, run the comparison, print and plot it."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from node.data import open_corpus
from node.data.source import require_document_end
from node.model import has_compiler
from node.monitoring.tables import table_console
from node.own_loops import require_our_loop
from node.own_modules import own_registry, with_modules
from node.run_dir import write_atomically
from node.run_file import load_run_file
from node.simulation import plot, report
from node.simulation.adversary import LIE_KINDS, Adversaries, LieKind
from node.simulation.comparison import DATA_PARALLEL, LOCAL, Comparison, compare, count_steps
from node.simulation.config import SimulationConfig, default_manifest, expand_per_peer, with_stages
from node.simulation.virtual.network import BYTES_PER_MEGABIT
from node.variants import merge_tables, parse_overrides, read_variant
from optim.compose import REGISTRY, Registry
from optim.method import Method
from optim.recipes import OptionTables
from protocol.errors import UsageError
from protocol.manifest.run import Manifest

DEFAULT_STEPS = 200
PLOT_POINTS = 20


@dataclass(frozen=True)
class SimulationOptions:
    """The command line of `murmur sim`; `bandwidth` is in megabits per second, `latency` in milliseconds."""

    recipes: tuple[str, ...]
    peers: int = 8
    steps: int | None = None
    tokens: int | None = None
    speeds: str = "1"
    bandwidth: str = "100"
    latency: float = 50.0
    churn: float = 0.0
    liars: str | None = None
    seeds: int = 3
    run: Path | None = None
    overrides: tuple[str, ...] = ()
    json: bool = False
    plot: Path | None = None
    compiled: bool = False
    stages: int | None = None
    imports: tuple[str, ...] = ()
    csv: Path | None = None


def simulate(options: SimulationOptions) -> None:
    """Run the comparison and print it. Raises MurmurError."""
    config = build_config(options)
    modules = with_modules(config.manifest, options.imports).method.modules
    registry = own_registry(modules)
    methods = compose_methods(options.recipes, config.manifest, parse_overrides(options.overrides), registry)
    corpus = open_corpus(config.manifest.data, config.base, modules)
    corpus.require_vocabulary(config.manifest.model.vocabulary)
    require_document_end(config.manifest.model, config.manifest.data, config.base)
    skipped = corpus.skip_log.take_report()
    for line in skipped.lines if skipped else ():
        sys.stderr.write(f"data: {line}\n")
    points = PLOT_POINTS if options.plot else 1
    torch.set_num_threads(1)  # the order of a sum, and so the losses of a seed, would depend on the number of cores
    with _progress_bar(count_steps(config, len(methods), options.seeds)) as on_step:
        comparison = compare(config, methods, corpus, options.seeds, points, on_step)
    _print_comparison(comparison, options.json)
    if options.csv:
        write_atomically(options.csv, report.render_csv(comparison).encode())
    if options.plot:
        write_atomically(options.plot, plot.render_svg(comparison).encode())


def _print_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(comparison.to_json(), indent=1) + "\n")
        return
    console = table_console()
    console.print(report.build_table(comparison, console.width))
    lines = (
        *report.format_short_runs(comparison),
        *report.format_pipelines(comparison),
        report.format_logic_time(comparison),
    )
    for line in lines:
        console.print(line)


def build_config(options: SimulationOptions) -> SimulationConfig:
    """Check the options. Raises UsageError, or ManifestError for the manifest of --run."""
    if options.steps is not None and options.tokens is not None:
        raise UsageError("--steps and --tokens both set the length of the run; give only one of them")
    if options.compiled and not has_compiler():
        raise UsageError("--compiled needs a C++ compiler (g++ or clang++); install one, or omit the option")
    for name, path in (("--plot", options.plot), ("--csv", options.csv)):
        if path and not path.parent.is_dir():  # checked now, because a comparison may take hours
            raise UsageError(f"{name}: {path.parent} is not a directory; create it, or name another file")
    given = load_run_file(options.run).manifest if options.run else None
    if given is not None:
        require_our_loop(given)
    manifest = given or default_manifest(DEFAULT_STEPS)
    stages = options.stages or manifest.pipeline.stages
    peers = _peers_per_stage(options, stages)
    steps = options.steps or DEFAULT_STEPS
    if options.tokens is not None:
        steps = max(1, options.tokens // (manifest.train.batch_tokens * peers))
    megabits = expand_per_peer(_parse_numbers(options.bandwidth, "--bandwidth"), peers, "--bandwidth")
    return SimulationConfig(
        manifest=with_stages(given or default_manifest(steps, stages), stages),
        base=options.run.parent if options.run else Path(),
        peers=peers,
        steps=steps,
        speeds=expand_per_peer(_parse_numbers(options.speeds, "--speeds"), peers, "--speeds"),
        bandwidths=tuple(value * BYTES_PER_MEGABIT for value in megabits),
        latency=options.latency / 1000,
        churn=options.churn,
        adversaries=_parse_adversaries(options.liars),
        compiled=options.compiled,
    )


def _peers_per_stage(options: SimulationOptions, stages: int) -> int:
    """Return the peers of each stage. Raises UsageError if they cannot be divided, or an option excludes stages."""
    if options.peers % stages:
        raise UsageError(
            f"--peers {options.peers} cannot be divided among {stages} stages; give a multiple of {stages}"
        )
    for name, given in (("--compiled", options.compiled), ("--liars", options.liars)):
        if stages > 1 and given:
            raise UsageError(f"{name} and --stages exclude each other; omit one of them")
    return options.peers // stages


def compose_methods(
    recipes: Sequence[str], manifest: Manifest, overrides: OptionTables, registry: Registry = REGISTRY
) -> Mapping[str, Method]:
    """Compose each recipe, or variant of one, with its defaults, the options of `--set`, and its own.

    The manifest's own recipe also gets the manifest's options.
    """
    methods = {}
    for text in recipes:
        if text in (DATA_PARALLEL, LOCAL):
            continue  # the baselines are always included
        variant = read_variant(text, registry)
        tables = manifest.method.overrides() if variant.recipe == manifest.method.recipe else {}
        changed = merge_tables(merge_tables(tables, overrides), variant.tables)
        methods[text] = replace(variant, tables=changed).compose(registry)
    return methods


def _parse_numbers(text: str, option: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: write comma-separated numbers, such as 1,1,0.5") from error


def _parse_adversaries(text: str | None) -> Adversaries | None:
    if text is None:
        return None
    fraction, _, kind = text.partition(":")
    known: dict[str, LieKind] = {name: name for name in get_args(LieKind)}
    if kind not in known or not _is_fraction(fraction):
        raise UsageError(
            f"--liars {text!r}: write fraction:kind, such as 0.25:sign-flip; kinds: {', '.join(LIE_KINDS)}"
        )
    return Adversaries(float(fraction), known[kind])


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error; yields the function to call after each inner step."""
    columns = (TextColumn("inner steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)

"""`murmur sim`: from the words of the command line to a comparison."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from node.data import open_source
from node.model import has_compiler
from node.run_dir import write_atomically
from node.simulation import plot, report
from node.simulation.adversary import LIE_KINDS, Adversaries, LieKind
from node.simulation.comparison import DATA_PARALLEL, LOCAL, Comparison, compare, count_steps
from node.simulation.config import SimulationConfig, default_manifest, expand_per_peer
from node.simulation.virtual_network import BYTES_PER_MEGABIT
from optim.compose import compose
from optim.errors import OptimError
from optim.method import Method
from optim.options import OptionValue
from optim.recipes import OptionTable, OptionTables
from protocol.errors import UsageError
from protocol.manifest import Manifest, load_manifest

DEFAULT_STEPS = 200
PLOT_POINTS = 20


@dataclass(frozen=True)
class SimulationOptions:
    """What the command line asked for. `bandwidth` in megabits and `latency` in milliseconds, as people say them."""

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


def simulate(options: SimulationOptions) -> None:
    """Prints the comparison. Raises MurmurError."""
    setting = build_config(options)
    methods = compose_methods(options.recipes, setting.manifest, parse_overrides(options.overrides))
    corpus = open_source(setting.manifest.data, setting.base)
    corpus.require_vocabulary(setting.manifest.model.vocabulary)
    points = PLOT_POINTS if options.plot else 1
    with _progress_bar(count_steps(setting, len(methods), options.seeds)) as counted:
        comparison = compare(setting, methods, corpus, options.seeds, points, counted)
    _print_comparison(comparison, options.json)
    if options.plot:
        write_atomically(options.plot, plot.render_svg(comparison).encode())


def _print_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(comparison.to_json(), indent=1) + "\n")
        return
    console = Console(width=report.TABLE_WIDTH)
    console.print(report.build_table(comparison))
    console.print(report.format_logic_time(comparison))


def build_config(options: SimulationOptions) -> SimulationConfig:
    """Raises UsageError, or ManifestError for the --run."""
    if options.steps is not None and options.tokens is not None:
        raise UsageError("--steps and --tokens both say how long; give one of them")
    if options.compiled and not has_compiler():
        raise UsageError("--compiled needs a C++ compiler (g++ or clang++); install one, or leave it out")
    if options.plot and not options.plot.parent.is_dir():  # said now: a comparison may take hours
        raise UsageError(f"--plot: there is no folder {options.plot.parent}; make it, or name a file elsewhere")
    given = load_manifest(options.run) if options.run else None
    batch = (given or default_manifest(DEFAULT_STEPS)).train.batch_tokens
    steps = options.steps or DEFAULT_STEPS
    if options.tokens is not None:
        steps = max(1, options.tokens // (batch * options.peers))
    megabits = expand_per_peer(_parse_numbers(options.bandwidth, "--bandwidth"), options.peers, "--bandwidth")
    return SimulationConfig(
        manifest=given or default_manifest(steps),
        base=options.run.parent if options.run else Path(),
        peers=options.peers,
        steps=steps,
        speeds=expand_per_peer(_parse_numbers(options.speeds, "--speeds"), options.peers, "--speeds"),
        bandwidths=tuple(value * BYTES_PER_MEGABIT for value in megabits),
        latency=options.latency / 1000,
        churn=options.churn,
        adversaries=_parse_adversaries(options.liars),
        compiled=options.compiled,
    )


def compose_methods(recipes: Sequence[str], manifest: Manifest, overrides: OptionTables) -> Mapping[str, Method]:
    """Each recipe with its own defaults and the options of `--set`; the manifest's recipe, with the manifest's too."""
    methods = {}
    for name in recipes:
        if name in (DATA_PARALLEL, LOCAL):
            continue  # always there
        tables = dict[str, OptionTable](manifest.method.overrides() if name == manifest.method.recipe else {})
        for part, options in overrides.items():
            tables[part] = {**tables.get(part, {}), **options}
        try:
            methods[name] = compose(name, tables)
        except OptimError as error:
            raise UsageError(str(error)) from error
    return methods


def parse_overrides(texts: Sequence[str]) -> OptionTables:
    """Return tables of options from texts `part.option=value`, each value as in a manifest; text needs no quotes."""
    found: dict[str, dict[str, OptionValue]] = {}
    for option in texts:
        place, equals, text = option.partition("=")
        part, dot, name = place.partition(".")
        if not (equals and dot and part and name and text):
            raise UsageError(f"--set {option!r}: write it as part.option=value, such as codec.k=128")
        found.setdefault(part, {})[name] = _parse_value(option, text)
    return found


def _parse_value(option: str, text: str) -> OptionValue:
    try:
        value: OptionValue = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise UsageError(f"--set {option!r}: not a TOML value: {error}") from error
        return text
    return value if isinstance(value, bool | int | float | str | dict | list) else text


def _parse_numbers(text: str, option: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: write numbers with commas between them, such as 1,1,0.5") from error


def _parse_adversaries(text: str | None) -> Adversaries | None:
    if text is None:
        return None
    share, _, kind = text.partition(":")
    known: dict[str, LieKind] = {name: name for name in get_args(LieKind)}
    if kind not in known or not _is_fraction(share):
        raise UsageError(f"--liars {text!r}: write share:kind, such as 0.25:sign-flip; kinds: {', '.join(LIE_KINDS)}")
    return Adversaries(float(share), known[kind])


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error; gives what to call for each inner step."""
    columns = (TextColumn("inner steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)

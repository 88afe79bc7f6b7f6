"""`murmur recipes`: list the training methods, show one in full, or advise one for a run, from figures measured before.

Composing all recipes and encoding values with each takes seconds and torch, so `recipes.json` has the results; a test
compares it with new measurements (`node.commands.recipes`, which also writes it). `recipe_losses.json` has the losses
that `benchmarks/recipes.py --report` writes.
"""

import difflib
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from node.monitoring.tables import choose_columns, describe_left_out, table_console
from protocol.errors import ManifestError, UsageError

RECORDED: Final = Path(__file__).with_name("recipes.json")
LOSSES: Final = Path(__file__).with_name("recipe_losses.json")
LOCAL: Final = "local"
BUSY: Final = 0.9  # share of the time that peers should compute
POOR: Final = 0.5  # a share below which another recipe does not help enough
SHOWN: Final = 10  # recipes of an advice
DEFAULT_PARTS = {"inner": "adamw", "signal": "pseudo-gradient", "aggregate": "mean", "adoption": "carry"}
NEEDS = {
    "anchor": "all peers hold the same weights between rounds",
    "partner": "each peer has its own weights and exchanges with a few other peers per round",
    "fates": "a peer learns whether its contribution was included, and sends it again if not",
}
COLUMNS = ("name", "message", "topology", "aggregate", "update", "inner steps", "bits", "bytes", "needs", "paper")
EXPENDABLE = ("paper", "needs", "bytes", "inner steps", "aggregate", "update", "topology")  # in a narrow terminal
PADDING = 2
MAX_WIDTH = 80  # of the list, which is to be read
ADVICE: Final = (
    "which to take: frugal over home links (the default); diloco for a long run on links",
    "of 100 Mbit/s or more; averaging for a short one; data-parallel within a data centre",
)
FOOT: Final = (
    "bits: per parameter and inner step, measured on the demo's model (data parallel in",
    "fp32: 32). `murmur recipes NAME` shows one in full, `murmur recipes --parts` the parts",
    "of all, and `murmur sim NAME...` compares them.",
)


def show_recipes(name: str | None, as_json: bool, parts: bool = False) -> None:
    """Print all recipes, or the one called `name`. Raises UsageError for an unknown recipe."""
    rows = json.loads(RECORDED.read_text())
    chosen = [row for row in rows if name in (None, row["name"])]
    if not chosen:
        names = [row["name"] for row in rows]
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise UsageError(f"no recipe is called {name!r}; {hint}: {', '.join(names)}")
    if as_json:
        shown = [{key: value for key, value in row.items() if key != "lines"} for row in chosen]
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    elif name:
        sys.stdout.write("\n".join(chosen[0]["lines"]) + "\n")
    elif parts:
        console = table_console()
        console.print(build_table(chosen, console.width))
    else:
        sys.stdout.write("\n".join(format_list(chosen, min(MAX_WIDTH, table_console().width))) + "\n")


def format_list(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines of a list that says of each recipe in a sentence how it works; each has at most `width` cells."""
    name_width = max(len(row["name"]) for row in rows) + 2
    indent = " " * (name_width + 8)
    for paragraph in (ADVICE, ()):
        yield from textwrap.wrap(" ".join(paragraph), width)
    yield ""
    yield f"{'recipe':<{name_width}}{'bits':>6}"
    for row in rows:
        start = f"{row['name']:<{name_width}}{row['bits_per_parameter_step']:>6.2g}  "
        yield from textwrap.wrap(row["summary"], width, initial_indent=start, subsequent_indent=indent)
    yield ""
    yield from textwrap.wrap(" ".join(FOOT), width)


def build_table(rows: Sequence[dict[str, Any]], width: int) -> Table:
    """Return the table with one row per recipe, at most `width` cells wide; it omits default parts."""
    cells = [_format_cells(row) for row in rows]
    kept = choose_columns(COLUMNS, cells, EXPENDABLE, width, PADDING)
    left_out = describe_left_out(COLUMNS, kept)
    omitted = ", ".join(DEFAULT_PARTS.values())
    caption = "\n".join(
        (
            f"bits per parameter and step; bytes per parameter besides weights and moments; omitted: {omitted}",
            *(f"{need}: {meaning}" for need, meaning in NEEDS.items()),
            *([f"{left_out}; `murmur recipes NAME` shows one recipe in full"] if left_out else []),
        )
    )
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1), pad_edge=False)
    for column in (COLUMNS[index] for index in kept):
        table.add_column(column, no_wrap=True, justify="right" if column in ("bits", "bytes") else "left")
    for row_cells in cells:
        table.add_row(*(Text(row_cells[index]) for index in kept))
    return table


def _format_cells(row: dict[str, Any]) -> tuple[str, ...]:
    shown = {part: "" if row[part] == kind else row[part] for part, kind in DEFAULT_PARTS.items()}
    residual = "+ residual" if row["feedback"] == "error" else ""
    message = " ".join(filter(None, (shown["signal"], _format_kinds(row["codec"]), residual)))
    inner_steps = ", ".join(filter(None, (shown["inner"], shown["adoption"])))
    figures = (f"{row['bits_per_parameter_step']:.3g}", str(row["memory_per_parameter"]))
    parts = (row["topology"], shown["aggregate"], row["update"], inner_steps)
    return (row["name"], message, *parts, *figures, ", ".join(row["needs"]), row["paper"])


def _format_kinds(kind: Any) -> str:
    """Return the kind, or the kinds of its phases: "int8 then topk"."""
    if not isinstance(kind, list):
        return str(kind)
    return " then ".join(str(phase["value"] if isinstance(phase, Mapping) else phase) for phase in kind)


@dataclass(frozen=True)
class Advice:
    """A recipe for one run: `busy`, the share of the time that its peers would compute, and recorded losses.

    `early` and `end` are losses over data parallel's, less 1, in the recorded runs; `early` is None if not recorded.
    """

    recipe: str
    busy: float
    early: float | None
    end: float


def advise(path: Path, peer_file: Path | None, as_json: bool) -> None:
    """Print which recipe to take for the run of a manifest. Raises MurmurError."""
    from node.commands.capacity import workload_of  # loads torch
    from node.commands.plan.arithmetic import predict
    from node.commands.plan.peers import load_peers, typical_peers
    from node.own_loops import NO_CODE
    from node.run_file import load_run_file
    from protocol.manifest.sections import MethodSection

    manifest, known = load_run_file(path).manifest, json.loads(LOSSES.read_text())
    if manifest.model.is_custom:
        raise UsageError(NO_CODE)
    parameters = workload_of(manifest).parameters
    kinds = load_peers(peer_file) if peer_file else typical_peers(manifest, parameters)
    found = list[Advice]()
    for name, losses in known["losses"].items():
        other = manifest.model_copy(update={"method": MethodSection(recipe=name)}) if name != LOCAL else None
        with suppress(ManifestError):  # it does not fit the model, its stages or audits
            if other is not None:
                found.append(Advice(name, predict(workload_of(other), kinds).fraction, losses["early"], losses["end"]))
    if not found:
        raise UsageError(f"no recipe of which losses are recorded fits {path}")
    ranked = rank(found)
    if as_json:
        values = {"take": ranked[0].recipe, "parameters": parameters, "recorded": known}
        sys.stdout.write(json.dumps({**values, "recipes": [asdict(each) for each in ranked]}, indent=1) + "\n")
        return
    facts = {**known, "own": manifest.method.recipe, "run": manifest.run.name, "size": parameters}
    sys.stdout.write("\n".join(format_advice(ranked, facts, peer_file is not None)) + "\n")


def rank(found: Sequence[Advice]) -> list[Advice]:
    """Order recipes: those that keep peers busy enough by their loss, then the others by their time.

    Enough is nine tenths of the time, or of the busiest recipe's share if none computes for that long.
    """
    enough = min(BUSY, BUSY * max(each.busy for each in found))
    return sorted(found, key=lambda each: (each.busy < enough, each.end if each.busy >= enough else -each.busy))


def format_advice(ranked: Sequence[Advice], facts: Mapping[str, Any], has_peers: bool) -> Iterator[str]:
    """Yield the advice for a run as lines of at most 80 cells.

    Args:
        ranked: the recipes, best first.
        facts: those of `recipe_losses.json`, with the run's name, its size and its own recipe.
        has_peers: whether the user has described the peers.
    """
    best, local = ranked[0], facts["losses"][LOCAL]["end"]
    own = next((each for each in ranked if each.recipe == facts["own"]), None)
    peers = "the peers of the file" if has_peers else "typical volunteers"
    yield f"take {best.recipe} for {facts['run']}: {peers} compute {best.busy:.0%} of the time"
    if best.busy < POOR:
        yield "no recipe keeps them busy in this run; `murmur plan RUN.toml` says why"
    early, end = f"loss, {facts['early_steps']} steps", f"{facts['steps']} steps"
    yield from ("", f"{'recipe':<20}{'computing':>10}{early:>18}{end:>12}")
    for each in [*ranked[:SHOWN], *([own] if own and own not in ranked[:SHOWN] else [])]:
        first = "-" if each.early is None else f"{each.early:+.1%}"
        mark = "  (the run's own)" if each is own else ""
        yield f"{each.recipe:<20}{each.busy:>10.0%}{first:>18}{each.end:>+12.1%}{mark}"
    yield ""
    times, millions = facts["size"] / facts["parameters"], facts["parameters"] / 1e6
    yield from textwrap.wrap(
        "Computing is the prediction of `murmur plan`, each recipe with its own defaults. Losses are above data "
        f"parallel's at equal tokens, measured with {millions:.1f} million parameters, in runs of "
        f"{facts['early_steps']} to {facts['steps']} steps and rounds of at most 25; peers that never exchange have "
        f"{local:+.1%}. This run's model has {times:.3g} times as many, and no law reaches beyond that "
        "(docs/results/law.md): compare the first ones with it by `murmur sim RECIPE... --run RUN.toml`.",
        MAX_WIDTH,
    )

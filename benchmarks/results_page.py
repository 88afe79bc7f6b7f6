"""Write docs/results/README.md: each question that an expert asks, with the figure, the command and the date.

    python -m benchmarks.results_page

Every figure comes from a recorded file of results, and a question whose file does not exist yet is left out, so its row
appears with the first run of this script after the file. The comment at the end of a row names the file and a part of
its hash. `tests/benchmarks/test_results_page.py` says when the page is out of date.
"""

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.law import Rows, crossing, fit_all
from benchmarks.recipes import Ledger
from node.simulation.comparison import LOCAL, RecipeResults

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "results" / "README.md"
OLD_DATES: Final = {
    **dict.fromkeys(("recipes.json", "liars.json", "activations.json"), "2026-11-27"),
    "rl.json": "2026-11-29",
    "adapters.json": "2026-11-29",
}
HASH_CHARACTERS: Final = 10
ATTACKS_THAT_ARE_NONE: Final = ("clean", "absent", "unequal data")
HEAD: Final = """# The questions, and the figures

Each figure is made from a file of recorded results by `python -m benchmarks.results_page`. The pages that a row names
say what was run, what else was tried, and what a figure does not show; [benchmarks.md](benchmarks.md) lists every
script, and how to read the figures; [failed.md](failed.md) has a paragraph for each trial that failed.

| question | figure | command, and when | more |
|---|---|---|---|
"""
OPEN_HEAD: Final = """
## Asked, and not recorded yet

| question | what is known, and what is missing |
|---|---|
"""
OPEN: Final = (
    (
        "Does the gap to data parallel shrink beyond 0.8 million parameters?",
        "[Up to there](law.md) rows of one seed are recorded. From 3 million on they want a card: `python -m "
        "benchmarks.card` has 3M, 10M, 30M and 124M in its queue. Until then `murmur recipes --for RUN.toml` advises "
        "by links and by the losses at 0.8 million",
    ),
    (
        "How fast is a peer on a card, and how much of the card's peak does it use?",
        "[One H200 at 85 million parameters](devices.md#a-gpu), 2026-11-26. `python -m benchmarks.card` has the other "
        "sizes in its queue, and needs a card",
    ),
)
Data = Any


@dataclass(frozen=True)
class Question:
    """A row of the page; `answer` makes the figure of the recorded file."""

    text: str
    file: str  # from the root of the repository
    answer: Callable[[Data], str]
    command: str
    page: str = ""


def results_of(data: Data, setting: str = "scratch") -> dict[str, RecipeResults]:
    """Return the runs of each recipe at its best rate, as the tables of docs/results/recipes.md have them."""
    ledger = Ledger(Path(os.devnull) / "none")
    ledger.runs = data["runs"]
    names = list(dict.fromkeys(run["name"] for run in ledger.runs.values()))
    return {results.name: results for results in ledger.comparison(setting, names).recipes}


def losses_of(data: Data, setting: str = "scratch") -> dict[str, float]:
    """Return the mean validation loss of each recipe over its seeds."""
    return {name: results.loss for name, results in results_of(data, setting).items()}


def answer_thousandth(data: Data) -> str:
    losses = losses_of(data)
    ideal = losses["data-parallel"]
    parts = [f"`{name}` {losses[name] / ideal - 1:+.1%}" for name in ("frugal 1", "frugal", "senders 10")]
    return (
        f"{', '.join(parts)} above data parallel's loss; peers that never exchange {losses['local'] / ideal - 1:+.1%}"
    )


def answer_hundredth(data: Data) -> str:
    losses, muon = losses_of(data), results_of(data)["averaging muon"]
    above = {name: losses[name] / losses["data-parallel"] - 1 for name in ("averaging muon", "averaging")}
    return (
        f"`averaging` with Muon {above['averaging muon']:+.1%} at {muon.mean('bits_per_parameter_step'):.2g} bits a "
        f"parameter and step, with AdamW {above['averaging']:+.1%}"
    )


def answer_virtual_share(data: Data) -> str:
    found = results_of(data)
    names = ("frugal", "averaging", "data-parallel")
    return ", ".join(f"`{name}` {found[name].mean('compute_share'):.0%}" for name in names)


def answer_worse_than_local(data: Data) -> str:
    counts = []
    for setting in ("scratch", "warm"):
        losses = losses_of(data, setting)
        worse = sum(loss > losses["local"] for loss in losses.values())
        counts.append(f"{worse} of {len(losses)} {'from scratch' if setting == 'scratch' else 'from a warm start'}")
    return ", ".join(counts)


def answer_lengths(data: Data) -> str:
    """Return gaps to data parallel after a fifth of the run, at the best rate of each, and at its end."""
    runs = [run for run in data["runs"].values() if run["setting"] == "grid"]
    first: dict[str, float] = {}
    for run in runs:
        loss = float(run["outcome"]["validation_loss"])
        first[run["name"]] = min(loss, first.get(run["name"], loss))
    last = losses_of(data)
    names = ("frugal 1", "frugal", "averaging muon", "averaging", "streaming-diloco", "diloco", "local")
    return "; ".join(
        f"`{name}` {first[name] / first['data-parallel'] - 1:+.1%} and {last[name] / last['data-parallel'] - 1:+.1%}"
        for name in names
    )


def answer_pipelines(data: Data) -> str:
    rows = {(row["layers"], row["step"]): row["fraction"] for row in data["rows"].values() if row["in_flight"] == 64}
    kinds = ((0, "all speeds at each stage"), (24, "24 layers dealt by speed"), (48, "48"))
    found = "; ".join(f"{name}: {rows[layers, 64]:.3f} and {rows[layers, 128]:.3f}" for layers, name in kinds)
    return f"{found}, of what they could compute, in steps of 64 and of 128 microbatches"


def answer_merge(data: Data) -> str:
    rival = data["costs"]["hivemind_8bit"]
    return "; ".join(
        f"{what}: {cost['cpu_seconds'] / rival['cpu_seconds']:.2f} of its CPU-seconds, "
        f"{cost['bytes'] / rival['bytes']:.2f} of its bytes"
        for what, name in (("strangers", "ours_dense"), ("peers that trust one another", "ours_trusted"))
        if (cost := data["costs"].get(name))
    )


def answer_rl(data: Data) -> str:
    """Return the rewards of each task, one seed after the other."""
    tasks = dict[str, list[Data]]()
    for run in data["processes"]:
        tasks.setdefault(run["task"], []).append(run)
    return "; ".join(
        f"`{task}`: {', '.join('{before:.2f} to {after:.2f}'.format(**run) for run in runs)}, "
        f"without updates {', '.join('{control:.2f}'.format(**run) for run in runs)}"
        for task, runs in tasks.items()
    )


def answer_adapters(data: Data) -> str:
    def describe(recipe: str, figures: Data) -> str:
        differences = ", ".join(f"{row['difference']:+.1%}" for row in figures["rows"])
        sent = max(row["bytes_a_peer"] for row in figures["rows"]) / 1e3
        return f"`{recipe}` {differences} and {sent:,.0f} kB sent by a peer"

    every = "; ".join(describe(recipe, figures) for recipe, figures in sorted(data.items(), reverse=True))
    return f"loss after 120 steps, by seed: {every}"


def answer_attacks(data: Data) -> str:
    def loss(defence: str, attack: str) -> float:
        cells = [cell["loss"] for key, cell in data.items() if key.rsplit("/", 1)[0] == f"frugal/{defence}/{attack}"]
        return statistics.fmean(cells)

    def worst(defence: str) -> tuple[float, str]:
        attacks = {key.split("/")[2] for key in data if key.startswith(f"frugal/{defence}/")} - {*ATTACKS_THAT_ARE_NONE}
        return max((loss(defence, attack) / loss(defence, "clean") - 1, attack) for attack in attacks)

    (kept, first), (lost, second) = worst("default"), worst("undefended")
    return f"at most {kept:+.1%} of the loss (`{first}`); without defences {lost:+.0%} (`{second}`)"


def answer_step(data: Data) -> str:
    return "; ".join(
        f"{row['size']} on {row['where']['device'].split(' torch')[0]}: {row['ratio']:.2f}, compiled "
        f"{row['compiled_ratio']:.2f}"
        for row in data
        if "compiled_ratio" in row
    )


def answer_card(data: Data) -> str:
    devices = sorted({row["device"] for row in data})
    parts = []
    for device in devices:
        rows = [row for row in data if row["device"] == device]
        parts.append(f"{device.split(' torch')[0]}: {sum(row['right'] for row in rows)} of {len(rows)} runs are right")
    has_card = any("cuda" in device for device in devices)
    return "; ".join(parts) + ("" if has_card else "; no card has run the queue yet")


def answer_logits(data: Data) -> str:
    sizes = {(row["what"], row["way"]): row["bytes"] for row in data}
    whole, chunks = sizes["131072", "all logits"], sizes["131072", "in chunks"]
    kept, again = sizes["layers", "none"], sizes["layers", "full"]
    return (
        f"loss of 131,072 words: {chunks / 1e6:,.0f} MB instead of {whole / 1e6:,.0f}; layers with `--recompute full`: "
        f"{again / 1e6:,.0f} MB instead of {kept / 1e6:,.0f}"
    )


def answer_grid(data: Data) -> str:
    rows = sorted(data, key=lambda row: (row["steps"], row["mbit"]))
    points = (
        f"H {row['steps']} at {row['mbit']:g} Mbit/s {row['computing']:.1%} ({row['theirs']:.1%})"
        for row in rows
        if row.get("theirs") is not None
    )
    return "; ".join(points)


def answer_goodput(data: Data) -> str:
    rows = data.values() if isinstance(data, Mapping) else data
    return "; ".join(
        f"{row['share']:.0%} die in a round: {row['of_living']:.1%} of what the living could make, longest wait "
        f"{row['longest_wait']:.0f} s, elastic data parallel {row['models']['elastic']['of_all']:.0%}"
        for row in rows
    )


def answer_law(data: Data) -> str:
    return "; ".join(
        f"`{law.method}` {'holds' if law.holds else 'does not hold'}: size^{law.size:+.2f} steps^{law.length:+.2f}, "
        f"a row left out is off by a factor of {law.error:.2f} (gaps shuffled: {law.chance:.2f})"
        for law in fit_all(rows_of(data).points())
    )


def answer_crossing(data: Data) -> str:
    """Return the lengths between which streaming DiLoCo passes peers that never exchange, by size."""
    points, method = rows_of(data).points(), "streaming-diloco"
    parts = []
    for size in sorted({point.parameters for point in points}):
        worse, better = crossing(points, method, size)
        gaps = {(one.method, one.steps): one.gap for one in points if one.parameters == size}
        shown = [
            f"{gaps[method, steps]:+.1%} and {gaps[LOCAL, steps]:+.1%} after {steps:,} steps"
            for steps in (worse, better)
            if steps
        ]
        parts.append(f"{size / 1e6:.2f} M: {'' if better else 'not yet, '}{', '.join(shown)}")
    return f"`streaming-diloco` and `local` above data parallel, four peers: {'; '.join(parts)}"


def rows_of(data: Data) -> Rows:
    rows = Rows(Path(os.devnull) / "none")
    rows.runs = data["runs"]
    return rows


LAW: Final = "docs/results/law.json"
RECIPES: Final = "benchmarks/results/recipes.json"
QUESTIONS: Final = (
    Question(
        "What share of the time do peers compute, in the setting of diloco-measured (theirs in brackets)?",
        "docs/results/grid.json", answer_grid, "python benchmarks/grid.py", "grid.md",
    ),
    Question(
        "How much work counts while peers die?",
        "docs/results/goodput.json", answer_goodput, "python benchmarks/goodput.py", "goodput.md",
    ),
    Question(
        "What does a thousandth of the bits of data parallel cost?",
        RECIPES, answer_thousandth, "python benchmarks/recipes.py", "recipes.md",
    ),
    Question("And a hundredth?", RECIPES, answer_hundredth, "python benchmarks/recipes.py", "recipes.md"),
    Question(
        "What share of the time do peers compute over 20 Mbit/s, in virtual time?",
        RECIPES, answer_virtual_share, "python benchmarks/recipes.py", "recipes.md",
    ),
    Question(
        "How many methods are worse than peers that never exchange, in 500 steps?",
        RECIPES, answer_worse_than_local, "python benchmarks/recipes.py", "recipes.md",
    ),
    Question(
        "Does the gap to data parallel close with the length of a run (after 100 and after 500 steps)?",
        RECIPES, answer_lengths, "python benchmarks/recipes.py", "frugal.md",
    ),
    Question("Is there a law of the gap to data parallel?", LAW, answer_law, "python benchmarks/law.py", "law.md"),
    Question(
        "When does training in the style of DiLoCo beat peers that never exchange?",
        LAW, answer_crossing, "python benchmarks/law.py", "law.md",
    ),
    Question(
        "What does a dense merge of four peers cost, with hivemind's averager in 8 bits as 1?",
        "docs/results/merge.json", answer_merge, "python benchmarks/sync.py --record", "merge.md",
    ),
    Question(
        "How busy are peers of speeds 1:2:4:8 in a pipeline, in virtual time?",
        "docs/results/pipelines.json", answer_pipelines, "python -m benchmarks.pipelining.dealt_layers --record FILE",
        "pipelines.md",
    ),
    Question(
        "What does an adapter lose in a swarm of four, beside PEFT in one process with the same tokens?",
        "docs/results/adapters.json", answer_adapters, "python -m benchmarks.adapters", "failed.md",
    ),
    Question(
        "Does learning from scores of volunteers' answers raise the reward, behind 20 Mbit/s and with deaths?",
        "docs/results/rl.json", answer_rl, "python -m benchmarks.rl", "rl.md",
    ),
    Question(
        "How fast is a step, with a plain torch loop as 1?",
        "docs/results/device.json", answer_step, "python -m benchmarks.device", "devices.md",
    ),
    Question(
        "Which options are right on which device?",
        "docs/results/card.json", answer_card, "python -m benchmarks.card", "devices.md",
    ),
    Question(
        "What does a pass keep in memory?",
        "docs/results/activations.json", answer_logits, "python -m benchmarks.activations", "devices.md",
    ),
    Question(
        "What can two liars of ten do to learning?",
        "benchmarks/results/liars.json", answer_attacks, "python benchmarks/liars.py", "liars.md",
    ),
)  # fmt: skip


def make_page(root: Path = ROOT) -> str:
    """Return the page of the results that are recorded."""
    rows = [line for question in QUESTIONS for line in make_row(question, root)]
    return "".join((HEAD, *rows, OPEN_HEAD, *(f"| {question} | {state} |\n" for question, state in OPEN)))


def make_row(question: Question, root: Path = ROOT) -> Iterator[str]:
    """Yield the row of a question, if its file exists."""
    path = root / question.file
    if not path.exists():
        return
    content = path.read_bytes()
    data = json.loads(content)
    when = newest_date(data) or OLD_DATES.get(path.name, "")
    more = f"[{question.page}]({question.page})" if question.page else f"[{path.name}]({path.name})"
    mark = f"<!-- {path.name} {hashlib.sha256(content).hexdigest()[:HASH_CHARACTERS]} -->"
    cells = (question.text, question.answer(data), f"`{question.command}`{', ' * bool(when)}{when}", f"{more} {mark}")
    yield f"| {' | '.join(cells)} |\n"


def newest_date(data: Data) -> str:
    """Return the newest date in a tree of JSON, but for searches of rates; empty if there is none."""
    found = ""
    if isinstance(data, Mapping):
        if data.get("setting") == "grid":  # a search of rates: no table shows it
            return ""
        found = str(data.get("date", ""))
        children: Sequence[Data] = list(data.values())
    else:
        children = data if isinstance(data, list) else ()
    return max([found, *map(newest_date, children)])


def main() -> int:
    """Write the page."""
    PAGE.write_text(make_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure what liars cost: attacks against defences, with real training and virtual peers.

    python benchmarks/liars.py [--json] [--results FILE] [--stages 1]

Ten peers of which the last two lie (`node/simulation/adversary.py`) train a small model for 40 rounds, with three
seeds that all cells share. A cell is a recipe, a defence and an attack; its ratio is its loss over that of the same
recipe and defence without liars, seed by seed. The attack `absent` is the eight honest peers alone: a filter that
leaves out every liar comes to that loss, so a second ratio compares with it.

Each run that is missing from the file is made and added, in four stages: the default public configuration; the
undefended mean of the same recipe; the default of the other recipes; the other defences. A run takes 4 seconds of a
core, a stage of one recipe and defence 3 minutes, all stages an hour. The exit code is 1 if the default misses a
target, or if the undefended mean loses too little for the attacks to prove anything.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch

from node.data import Corpus, open_corpus, validation_batches
from node.data.corpus import TokenArray
from node.simulation.adversary import LIE_KINDS, TARGET, TRIGGER, Adversaries, LieKind
from node.simulation.config import SimulationConfig, default_manifest
from node.simulation.measurement import Evaluator
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from optim.compose import compose
from optim.recipes import OptionTables
from protocol.errors import MurmurError
from protocol.manifest.model import ModelSection

PEERS, LIARS, SEEDS, INNER_STEPS, ROUNDS = 10, 2, 3, 4, 40
STEPS: Final = INNER_STEPS * ROUNDS
BATCH_TOKENS, WARMUP_STEPS = 128, 20
MODEL: Final = ModelSection(width=32, layers=1, heads=2, hidden=84, context=32)
RESULTS: Final = Path(__file__).parent / "results" / "liars.json"
CLEAN, ABSENT, UNEQUAL = "clean", "absent", "unequal data"
LIES: Final = tuple(kind for kind in LIE_KINDS if kind != "wrong-data")  # text of another key, which harms nobody
BACKDOORS: Final = ("backdoor", "quiet-backdoor")
ATTACKS: Final = (CLEAN, ABSENT, UNEQUAL, *LIES)
MEMORY: Final = 256  # of `frugal`
WIDE_OPEN: Final = 1e6  # a gate that lets everything pass

MAX_DEFAULT, MAX_COST, MAX_BACKDOOR, MAX_REFUSED, MIN_UNDEFENDED = 1.01, 1.002, 0.05, 0.05, 1.025


@dataclass(frozen=True)
class Setting:
    """A recipe, tuned without liars; `mean` is its aggregation rule, without any defence."""

    name: str
    learning_rate: float
    mean: Mapping[str, Any]
    tables: OptionTables
    has_dense_messages: bool = False

    def defences(self) -> dict[str, dict[str, Any]]:
        """Return the aggregation rule of each defence."""
        senders = {"over": "senders"} if self.mean["kind"] == "sender-mean" else {}
        rules = {
            "undefended": {**self.mean, "clip": False, "gate": WIDE_OPEN},
            "default": {"kind": "filtered", **senders, "memory": MEMORY},
            "clip": {**self.mean, "clip": True, "gate": WIDE_OPEN},
            "gate": {**self.mean, "clip": False},
        }
        dense: dict[str, dict[str, Any]] = {
            "centred-clip": {"kind": "centred-clip", "gate": WIDE_OPEN},
            "trimmed-mean": {"kind": "trimmed-mean", "gate": WIDE_OPEN},
        }
        return {**rules, **(dense if self.has_dense_messages else {})}


GATHER: Final[OptionTables] = {"schedule": {"inner_steps": INNER_STEPS}, "topology": {"kind": "gather"}}
# Rates are the best of a factor of 2 without liars. At 8e-3 `frugal` has a loss 2 % lower, but eight peers then train
# better than ten, and seeds differ by more than a liar costs.
SETTINGS: Final = (
    Setting("frugal", 4e-3, {"kind": "sender-mean"}, {"schedule": {"inner_steps": INNER_STEPS, "ahead": INNER_STEPS}}),
    Setting("sparseloco", 3.2e-2, {"kind": "mean"}, GATHER),
    Setting("diloco", 1.6e-2, {"kind": "mean"}, {**GATHER, "update": {"learning_rate": 0.7, "momentum": 0.5}}, True),
    Setting("averaging", 1.6e-2, {"kind": "mean"}, GATHER, True),
)


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    recipe: str
    defence: str
    attack: str
    seed: int

    @property
    def key(self) -> str:
        return "/".join((self.recipe, self.defence, self.attack, str(self.seed)))


class Laboratory:
    """Runs cells; the text and the validation windows are the same for all."""

    @cached_property
    def _corpus(self) -> Corpus:
        corpus = open_corpus(default_manifest(STEPS).data, Path())
        source = corpus.sources[0]
        training = source.training
        if isinstance(training, TokenArray):  # one shard is read several times faster than a thousand files
            training = TokenArray([training.read(0, len(training)).astype(np.uint16)])
        return replace(corpus, sources=(replace(source, training=training),))

    def run(self, setting: Setting, cell: Cell) -> dict[str, Any]:
        """Run a cell; a run that diverges has the loss of a model that knows nothing."""
        config = self._config(setting, cell)
        method = compose(setting.name, {**setting.tables, "aggregate": setting.defences()[cell.defence]})
        swarm = VirtualSwarm(config, method, self._corpus, lambda _swarm, _peer: None, lambda: None)
        try:
            swarm.run()
        except MurmurError:
            return {"loss": math.log(config.manifest.model.vocabulary), "diverged": True, "reasons": []}
        loss = Evaluator(config, self._corpus).loss(swarm.live_peers[0].applied_state[0].anchor)
        backdoor = self._backdoor_success(config, swarm) if cell.attack in BACKDOORS else 0.0
        return {"loss": loss, "backdoor": backdoor, **_count_left_out(swarm)}

    def _config(self, setting: Setting, cell: Cell) -> SimulationConfig:
        manifest = default_manifest(STEPS)
        train = {"batch_tokens": BATCH_TOKENS, "learning_rate": setting.learning_rate, "warmup_steps": WARMUP_STEPS}
        manifest = manifest.model_copy(
            update={
                "model": MODEL,
                "train": manifest.train.model_copy(update=train),
                "run": manifest.run.model_copy(update={"seed": cell.seed}),
            }
        )
        kinds: dict[str, LieKind] = {kind: kind for kind in get_args(LieKind)}
        liars = Adversaries(LIARS / PEERS, kinds[cell.attack]) if cell.attack in kinds else None
        peers = PEERS - LIARS if cell.attack == ABSENT else PEERS
        speeds, links = (1.0,) * peers, (1e8,) * peers
        return SimulationConfig(
            manifest, Path(), peers, STEPS, speeds, links, 0.01, adversaries=liars, unequal=cell.attack == UNEQUAL
        )

    def _backdoor_success(self, config: SimulationConfig, swarm: VirtualSwarm) -> float:
        """Return the share of triggers in the held-out text that the model continues by the target."""
        model = config.build_model()
        model.load_flat(swarm.live_peers[0].applied_state[0].anchor)
        fooled = triggers = 0
        for windows in validation_batches(self._corpus, config.manifest.model.context, 65_536):
            inputs = windows[:, :-1]
            with torch.inference_mode():
                chosen = model(inputs).argmax(-1)
            triggers += int((inputs == TRIGGER).sum())
            fooled += int((chosen[inputs == TRIGGER] == TARGET).sum())
        return fooled / max(1, triggers)


def _count_left_out(swarm: VirtualSwarm) -> dict[str, Any]:
    """Count the contributions that the rule left out, of honest peers and of liars."""
    liars = swarm.config.adversaries
    lies = {simulated_peer_id(slot) for slot in range(PEERS) if liars and liars.has(slot, PEERS)}
    included = [entry.sender for commit in swarm.accounting.commits.values() for entry in commit.contributions]
    left_out = swarm.accounting.left_out.items()
    return {
        "honest_left_out": sum(count for (peer, _), count in left_out if peer not in lies)
        / max(1, sum(peer not in lies for peer in included)),
        "liars_left_out": sum(count for (peer, _), count in left_out if peer in lies)
        / max(1, sum(peer in lies for peer in included)),
        "reasons": sorted({why for (_, why), _ in left_out}),
    }


def cells_of_stage(stage: int) -> Iterator[tuple[Setting, Cell]]:
    """Yield the cells of a stage, seed by seed."""
    for seed in range(SEEDS):
        for setting in SETTINGS:
            for defence in setting.defences():
                if stage == _stage_of(setting, defence):
                    yield from ((setting, Cell(setting.name, defence, attack, seed)) for attack in ATTACKS)


def _stage_of(setting: Setting, defence: str) -> int:
    """Return 1 and 2 for the default and no defence of the public recipe, 3 for other defaults, 4 for all else."""
    stages = {"default": 1, "undefended": 2} if setting is SETTINGS[0] else {"default": 3}
    return stages.get(defence, 4)


def fill(path: Path, stages: int) -> dict[str, Any]:
    """Make the runs that the file lacks, and add each as it is made."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    laboratory = Laboratory()
    for stage in range(1, stages + 1):
        for setting, cell in cells_of_stage(stage):
            if cell.key not in results:
                results[cell.key] = laboratory.run(setting, cell)
                path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                sys.stderr.write(f"{cell.key} {results[cell.key]['loss']:.4f}\n")
    return results


def build_report(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON report; a cell without any seed that its clean run has too is missing from it."""
    table = {
        setting.name: {
            defence: {
                attack: figures for attack in ATTACKS if (figures := _summarize(results, setting.name, defence, attack))
            }
            for defence in setting.defences()
        }
        for setting in SETTINGS
    }
    name = SETTINGS[0].name
    first = table[name]
    return {
        "default": _ratios(first["default"]),
        "cost": _mean(_seed_ratios(results, (name, "default", CLEAN), (name, "undefended", CLEAN))),
        "floor": first["default"].get(ABSENT, {}).get("ratio"),
        "undefended": _ratios(first["undefended"]),
        "backdoor": max((first["default"].get(kind, {}).get("backdoor", 0.0) for kind in BACKDOORS), default=None),
        "honest_left_out": first["default"].get(UNEQUAL, {}).get("honest_left_out"),
        "table": table,
    }


def _ratios(row: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {attack: row[attack]["ratio"] for attack in LIES if attack in row}


def _summarize(results: Mapping[str, Any], recipe: str, defence: str, attack: str) -> dict[str, Any]:
    found = [run for run in _runs(results, recipe, defence, attack) if run]
    ratios = _seed_ratios(results, (recipe, defence, attack), (recipe, defence, CLEAN))
    if not ratios:
        return {}
    names = ("loss", "backdoor", "honest_left_out", "liars_left_out")
    return {
        "ratio": _mean(ratios),
        "worst": max(ratios),
        "to_floor": _mean(_seed_ratios(results, (recipe, defence, attack), (recipe, defence, ABSENT))),
        "seeds": len(ratios),
        "diverged": sum("diverged" in run for run in found),
        "reasons": sorted({why for run in found for why in run["reasons"]}),
        **{name: statistics.fmean(run.get(name, 0.0) for run in found) for name in names},
    }


def _runs(results: Mapping[str, Any], recipe: str, defence: str, attack: str) -> list[dict[str, Any] | None]:
    """Return the run of each seed, `None` where it was not made."""
    return [results.get(Cell(recipe, defence, attack, seed).key) for seed in range(SEEDS)]


def _seed_ratios(results: Mapping[str, Any], above: tuple[str, str, str], below: tuple[str, str, str]) -> list[float]:
    """Return the ratios of the losses of two cells, for the seeds that both have."""
    pairs = zip(_runs(results, *above), _runs(results, *below), strict=True)
    return [one["loss"] / two["loss"] for one, two in pairs if one and two]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def missed_targets(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each target that the report misses."""
    lines = [f"{attack}: {ratio:.4f} of clean" for attack, ratio in report["default"].items() if ratio > MAX_DEFAULT]
    row = report["table"][SETTINGS[0].name]["default"]
    lines += [f"{attack}: not all seeds" for attack in ATTACKS if row.get(attack, {}).get("seeds", 0) < SEEDS]
    if report["cost"] is None or report["cost"] > MAX_COST:
        lines.append(f"cost without attack: {report['cost']}")
    if (report["backdoor"] or 0.0) > MAX_BACKDOOR:
        lines.append(f"backdoor: {report['backdoor']:.3f}")
    if (report["honest_left_out"] or 0.0) > MAX_REFUSED:
        lines.append(f"honest contributions left out: {report['honest_left_out']:.3f}")
    if max(report["undefended"].values(), default=0.0) < MIN_UNDEFENDED:
        lines.append("no power: the undefended mean withstands all attacks")
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """Return the tables: the default of the public recipe in full, and the ratios of each recipe."""
    lines = [
        "| attack | of clean | worst seed | of the honest alone | liars left out, as | backdoor |",
        "|---" * 6 + "|",
    ]
    for attack, row in report["table"][SETTINGS[0].name]["default"].items():
        why = f"{row['liars_left_out']:.0%}" + (f" ({', '.join(row['reasons'])})" if row["reasons"] else "")
        backdoor = f"{row['backdoor']:.1%}" if attack in BACKDOORS else ""
        ratios = " | ".join(_percent(row[name]) for name in ("ratio", "worst", "to_floor"))
        lines.append(f"| {attack} | {ratios} | {why} | {backdoor} |")
    for recipe, defences in report["table"].items():
        known = [defence for defence, row in defences.items() if row]
        if known:
            lines += [f"\n{recipe}\n", f"| attack | {' | '.join(known)} |", "|---" * (len(known) + 1) + "|"]
            lines += [
                _ratio_row(attack, [defences[defence].get(attack) for defence in known]) for attack in ATTACKS[1:]
            ]
    return "\n".join(lines)


def _ratio_row(attack: str, cells: list[Mapping[str, Any] | None]) -> str:
    """Return a row of ratios to clean; those of fewer than all seeds name their number."""
    shown = []
    for cell in cells:
        notes = [] if cell is None or cell["seeds"] == SEEDS else [f"{cell['seeds']} of {SEEDS}"]
        notes += ["diverged"] if cell and cell["diverged"] else []
        shown.append((_percent(cell["ratio"]) if cell else "") + (f" ({', '.join(notes)})" if notes else ""))
    return f"| {attack} | {' | '.join(shown)} |"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--stages", type=int, default=4, choices=range(5))
    words = parser.parse_args()
    torch.set_num_threads(1)
    report = build_report(fill(words.results, words.stages))
    missed = missed_targets(report)
    print(json.dumps({**report, "missed": missed}, indent=1) if words.json else markdown(report))
    sys.stderr.writelines(f"missed: {line}\n" for line in missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

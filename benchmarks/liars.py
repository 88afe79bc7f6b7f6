"""Measure what liars cost: attacks against defences, with real training and virtual peers.

    python benchmarks/liars.py [--json] [--results FILE] [--stages 1]

Ten peers of which the last two lie (`node/simulation/adversary.py`) train a small model for 20 rounds, with three
seeds that all cells share. A cell is a recipe, a defence and an attack; its ratio is its loss over that of the same
recipe and defence without liars, seed by seed. Each run that is missing from the file is made and added, in stages: the
default public configuration and the undefended mean; the other defences of that recipe; the other recipes. All stages
take about an hour of one core, the first one seven minutes. The exit code is 1 if the default misses a target, or if
the undefended mean loses too little for the attacks to prove anything.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch

from node.data import Corpus, open_source, validation_batches
from node.data.corpus import TokenArray
from node.simulation.adversary import LIE_KINDS, TARGET, TRIGGER, Adversaries, LieKind
from node.simulation.config import SimulationConfig, default_manifest
from node.simulation.measurement import Evaluator
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from optim.compose import compose
from optim.recipes import OptionTables
from protocol.errors import MurmurError
from protocol.manifest import ModelSection

PEERS, LIARS, SEEDS, INNER_STEPS, ROUNDS = 10, 2, 3, 4, 40
STEPS: Final = INNER_STEPS * ROUNDS
BATCH_TOKENS, WARMUP_STEPS = 128, 20
MODEL: Final = ModelSection(width=32, layers=1, heads=2, hidden=84, context=32)
RESULTS: Final = Path(__file__).parent / "results" / "liars.json"
CLEAN, ABSENT, UNEQUAL = "clean", "absent", "unequal data"
LIES: Final = tuple(kind for kind in LIE_KINDS if kind != "wrong-data")  # text of another key, which harms nobody
WITH_BACKDOOR: Final = (CLEAN, "backdoor", "quiet-backdoor")
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
SETTINGS: Final = (
    Setting("frugal", 4e-3, {"kind": "sender-mean"}, {"schedule": {"inner_steps": INNER_STEPS, "ahead": INNER_STEPS}}),
    Setting("sparseloco", 8e-3, {"kind": "mean"}, GATHER),
    Setting("diloco", 4e-3, {"kind": "mean"}, {**GATHER, "update": {"learning_rate": 0.7, "momentum": 0.5}}, True),
    Setting("averaging", 8e-3, {"kind": "mean"}, GATHER, True),
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
        corpus = open_source(default_manifest(STEPS).data, Path())
        training = corpus.training
        if isinstance(training, TokenArray):  # one shard is read several times faster than a thousand files
            training = TokenArray([training.read(0, len(training)).astype(np.uint16)])
        return replace(corpus, training=training)

    def run(self, setting: Setting, cell: Cell) -> dict[str, Any]:
        """Run a cell; a run that diverges has the loss of a model that knows nothing."""
        config = self._config(setting, cell)
        method = compose(setting.name, {**setting.tables, "aggregate": setting.defences()[cell.defence]})
        swarm = VirtualSwarm(config, method, self._corpus, lambda _swarm, _peer: None, lambda: None)
        try:
            swarm.run()
        except MurmurError:
            return {"loss": math.log(config.manifest.model.vocabulary), "diverged": True}
        loss = Evaluator(config, self._corpus).loss(swarm.live_peers[0].applied_state[0].anchor)
        backdoor = self._backdoor_success(config, swarm) if cell.attack in WITH_BACKDOOR else 0.0
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
    """Yield the cells of a stage, seed by seed.

    1: the default and the undefended mean of the public recipe; 2: the default of the other recipes; 3: all others.
    """
    for seed in range(SEEDS):
        for setting in SETTINGS:
            for defence in setting.defences():
                if stage == _stage_of(setting, defence):
                    yield from ((setting, Cell(setting.name, defence, attack, seed)) for attack in ATTACKS)


def _stage_of(setting: Setting, defence: str) -> int:
    if setting is SETTINGS[0]:
        return 1 if defence in ("default", "undefended") else 3
    return 2 if defence == "default" else 3


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
    """Return the JSON report; a cell without all of its seeds is missing from it."""
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
        "cost": _mean_ratio(results, (name, "default", CLEAN), (name, "undefended", CLEAN)),
        "undefended": _ratios(first["undefended"]),
        "backdoor": first["default"].get("backdoor", {}).get("backdoor"),
        "honest_left_out": first["default"].get(UNEQUAL, {}).get("honest_left_out"),
        "table": table,
    }


def _ratios(row: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {attack: row[attack]["ratio"] for attack in LIES if attack in row}


def _summarize(results: Mapping[str, Any], recipe: str, defence: str, attack: str) -> dict[str, Any]:
    found = _runs(results, recipe, defence, attack)
    ratio = _mean_ratio(results, (recipe, defence, attack), (recipe, defence, CLEAN))
    if ratio is None:
        return {}
    means = {
        name: statistics.fmean(run.get(name, 0.0) for run in found)
        for name in ("loss", "backdoor", "honest_left_out", "liars_left_out")
    }
    return {"ratio": ratio, "diverged": sum(run.get("diverged", False) for run in found), **means}


def _runs(results: Mapping[str, Any], recipe: str, defence: str, attack: str) -> list[dict[str, Any]]:
    keys = [Cell(recipe, defence, attack, seed).key for seed in range(SEEDS)]
    return [results[key] for key in keys if key in results]


def _mean_ratio(results: Mapping[str, Any], above: tuple[str, str, str], below: tuple[str, str, str]) -> float | None:
    """Return the mean ratio of the losses of two cells, seed by seed; `None` if one is not complete."""
    first, second = _runs(results, *above), _runs(results, *below)
    if min(len(first), len(second)) < SEEDS:
        return None
    return statistics.fmean(one["loss"] / two["loss"] for one, two in zip(first, second, strict=True))


def missed_targets(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each target that the report misses."""
    lines = [f"{attack}: {ratio:.4f} of clean" for attack, ratio in report["default"].items() if ratio > MAX_DEFAULT]
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
    """Return the table of ratios, a row for each attack."""
    lines = []
    for recipe, defences in report["table"].items():
        known = [defence for defence, row in defences.items() if row]
        if not known:
            continue
        lines += [f"\n{recipe}\n", f"| attack | {' | '.join(known)} |", "|---" * (len(known) + 1) + "|"]
        for attack in ATTACKS[1:]:
            cells = [_percent(defences[defence].get(attack)) for defence in known]
            lines.append(f"| {attack} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(figures: Mapping[str, Any] | None) -> str:
    if not figures:
        return ""
    return f"{figures['ratio'] - 1:+.1%}" + (" (diverged)" if figures["diverged"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--stages", type=int, default=3, choices=range(4))
    words = parser.parse_args()
    torch.set_num_threads(1)
    report = build_report(fill(words.results, words.stages))
    missed = missed_targets(report)
    print(json.dumps({**report, "missed": missed}, indent=1) if words.json else markdown(report))
    sys.stderr.writelines(f"missed: {line}\n" for line in missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Each kind of model in a swarm of three real processes, from the weights of transformers, with a death half-way.

    python benchmarks/families.py [--kinds llama qwen3 qwen3-moe] [--steps 50] [--json]

transformers makes a small random model of the kind and saves it. `murmur up --drill` starts from that folder: its first
line has the validation loss of the weights, which must be the one that transformers computes on the same text. The
peers make `steps` inner steps each, in rounds of 5; one is killed with SIGKILL in the middle and comes back. At the end
all must hold the same model, and transformers must load the export and find the validation loss that `murmur up` found.
Exit code 1 where one of these fails. About two minutes a kind on two cores.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from node.data import open_corpus, validation_batches
from node.data.check import VALIDATION_TOKENS
from node.processes.process import python_environment
from node.run_file import load_run_file

INNER_STEPS = 5
LARGEST_DIFFERENCE = 1e-4  # of two losses; both sum in fp32, in another order
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen3": {"tie_word_embeddings": True},
    "qwen3-moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
}
MANIFEST = """
[run]
name = "{name}"
[model]
from = "weights"
[data]
source = "python-stdlib"
[train]
batch_tokens = 2048
microbatch = 16
learning_rate = 2e-3
warmup_steps = 5
[method]
recipe = "diloco"
schedule = {{ inner_steps = {inner_steps} }}
"""


@dataclass
class Row:
    """The figures of one kind; losses are validation losses in nats per token."""

    kind: str
    parameters: int
    start_by_transformers: float
    start: float
    end: float
    end_by_transformers: float
    rounds: int
    lost: int
    rejoined: int
    agreed: bool
    seconds: float

    @property
    def is_good(self) -> bool:
        """Return whether the run did what it should."""
        pairs = ((self.start, self.start_by_transformers), (self.end, self.end_by_transformers))
        is_same = all(abs(ours - theirs) < LARGEST_DIFFERENCE for ours, theirs in pairs)
        return is_same and self.agreed and self.lost == self.rejoined == 1 and self.end < self.start - 0.5


def save_weights(kind: str, folder: Path) -> None:
    """Let transformers save a random model whose values are far from those that a run would draw."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.replace("-", "_"), **SIZES, **MORE[kind])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(folder)


@torch.no_grad()
def loss_by_transformers(folder: Path, run: Path) -> float:
    """Return the validation loss of a folder, on the windows that `murmur up` measures with."""
    manifest = load_run_file(run).manifest
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens = 0.0, 0
    corpus = open_corpus(manifest.data, run.parent)
    for windows in validation_batches(corpus, manifest.model.context, VALIDATION_TOKENS):
        logits, targets = model(windows[:, :-1]).logits, windows[:, 1:]
        total += functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        tokens += targets.numel()
    return total / tokens


def train(kind: str, steps: int, home: Path) -> Row:
    """Run the swarm of one kind."""
    save_weights(kind, home / "weights")
    run = home / "run.toml"
    run.write_text(MANIFEST.format(name=kind, inner_steps=INNER_STEPS))
    command = [sys.executable, "-m", "node.cli", "up", str(run), "--peers", "3", "--drill", "--json"]
    command += ["--rounds", str(steps // INNER_STEPS), "--dir", str(home / "swarm")]
    ended = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=False)
    started = re.search(r"start: validation loss ([\d.]+)", ended.stderr)
    if ended.returncode not in (0, 1) or started is None:
        raise SystemExit(f"{kind}: murmur up ended with {ended.returncode}: {ended.stderr[-2000:]}")
    report = json.loads(ended.stdout)
    return Row(
        kind=kind,
        parameters=report["parameters"],
        start_by_transformers=loss_by_transformers(home / "weights", run),
        start=float(started[1]),
        end=report["validation_loss"],
        end_by_transformers=loss_by_transformers(Path(report["export"]), run),
        rounds=report["rounds"],
        lost=report["peers_lost"],
        rejoined=report["peers_rejoined"],
        agreed=report["agreed"],
        seconds=report["seconds"],
    )


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| kind | parameters | first loss | by transformers | last loss | by transformers | digests | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        digests = f"all equal, {row.lost} killed, {row.rejoined} back" if row.agreed else "DIFFER"
        lines.append(
            f"| {row.kind} | {row.parameters:,} | {row.start:.4f} | {row.start_by_transformers:.4f} | {row.end:.4f} "
            f"| {row.end_by_transformers:.4f} | {digests} | {row.seconds:.0f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=tuple(MORE), default=tuple(MORE))
    parser.add_argument("--steps", type=int, default=50, help="inner steps of each peer")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    rows = []
    for kind in words.kinds:
        with tempfile.TemporaryDirectory(prefix="families-") as home:
            rows.append(train(kind, words.steps, Path(home)))
        print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows], indent=1) if words.json else table(rows))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()

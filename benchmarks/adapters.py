"""An adapter trained by a swarm of four, and by PEFT and torch in one process on the same tokens.

    python -m benchmarks.adapters [--recipe qsdp] [--steps 120] [--seeds 3] [--rates 0.005 0.01 0.02 0.04] [--record]

A small model is trained on the library of this Python first, and frozen. Its adapter then learns other text: the pages
of this repository, so losses of different commits do not compare. Four virtual peers train it with `frugal` (or
`--recipe`) on links of 20 Mbit/s; PEFT trains the same adapter from the same factors, each step on the batches of all
four peers together. Losses are those of the same held-out text, in nats per token. Both take their best of the same
learning rates, found with the first seed; every loss of that search is printed. The last column is the difference;
exit code 1 if it is above 1 % for the mean of the seeds. About two minutes a rate and seed on two cores. `--record`
puts the figures of the recipe into docs/results/adapters.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data import BatchReader, Corpus, open_corpus
from node.data.tokenizer import ByteTokenizer
from node.from_manifest import build_program, learning_rate_scale
from node.model import build_model, initial_weights, shape_table
from node.model.export import write_export
from node.model.weight_files import block_digests, start_weights
from node.simulation.comparison import run_simulation
from node.simulation.config import SimulationConfig
from node.simulation.measurement import Evaluator, SimulationResult
from node.simulation.swarm import simulated_peer_id
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from optim.compose import compose
from optim.inner.adamw import AdamW
from optim.inner.gradient_accumulation import GradientAccumulator
from protocol.manifest.run import Manifest

PEERS: Final = 4
MAX_DIFFERENCE: Final = 0.01
PAGES: Final = Path(__file__).parents[1] / "docs"
RESULTS: Final = PAGES / "results" / "adapters.json"
MODEL: Final = {"width": 96, "layers": 3, "heads": 4, "hidden": 256, "context": 64}
ADAPTER: Final = {"rank": 8, "alpha": 16.0, "base": "fp32"}


@dataclass
class Row:
    """Validation losses of one seed, each side at its own learning rate."""

    seed: int
    base: float
    swarm: float
    peft: float
    bytes_a_peer: float

    @property
    def difference(self) -> float:
        """Return the loss of the swarm above PEFT's, as a share of it."""
        return self.swarm / self.peft - 1


@dataclass(frozen=True)
class Rates:
    """The learning rate of each side."""

    swarm: float
    peft: float


def manifest_of(seed: int, steps: int, data: dict[str, Any], rate: float, recipe: str, **more: Any) -> Manifest:
    method: dict[str, Any] = {"recipe": recipe}
    if compose(recipe).inner.kind == GradientAccumulator.kind:
        method["update"] = {"learning_rate": rate}  # only the outer step moves the weights
    return Manifest.model_validate(
        {
            "run": {"name": "adapters", "seed": seed},
            "model": MODEL,
            "data": data,
            "train": {"batch_tokens": 512, "learning_rate": rate, "warmup_steps": 5, "decay_steps": steps},
            "method": method,
            **more,
        }
    )


def make_base(folder: Path, steps: int) -> Manifest:
    """Train the model that is frozen, and write it as a folder of Hugging Face."""
    manifest = manifest_of(0, steps, {"source": "python-stdlib"}, 3e-3, "frugal")
    corpus, model = open_corpus(manifest.data, folder), build_model(manifest.model)
    model.load_flat(initial_weights(manifest.model, 0))
    reader = BatchReader(corpus, manifest.model.context, 0, "base")
    optimizer = InnerOptimizer(model, manifest.train, AdamW())
    for step in range(steps):
        accumulate_gradient(model, reader.next_batch(manifest.train.batch_tokens // manifest.model.context), 8)
        optimizer.step(step)
        optimizer.clear_gradient()
    write_export(TrainedWeights(manifest, 0, model.flat.clone()), ByteTokenizer(), folder)
    named = {"from_": str(folder), "weights": block_digests(manifest.model, model.flat)}
    return manifest.model_copy(update={"model": manifest.model.model_copy(update=named)})


def adapted(base: Manifest, seed: int, steps: int, rate: float, recipe: str) -> Manifest:
    data = {"source": "text", "path": str(PAGES / "**" / "*.md"), "validation_share": 0.1}
    more = {"adapter": ADAPTER, "model": base.model.model_dump(by_alias=True)}
    return manifest_of(seed, steps, data, rate, recipe, **more)


def train_with_peft(manifest: Manifest, corpus: Corpus, steps: int) -> Tensor:
    """Train the same adapter in one process; return its factors in the order of the run's vector."""
    import peft
    from transformers import AutoModelForCausalLM

    assert manifest.adapter is not None
    folder, table, train = Path(manifest.model.from_), shape_table(manifest.model), manifest.train
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=manifest.adapter.rank,
        lora_alpha=int(manifest.adapter.alpha),
        target_modules=list(manifest.adapter.targets),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(base, config)
    named, first = dict(model.named_parameters()), start_weights(manifest, folder)
    assert first is not None
    factors = {name: named[f"base_model.model.{name.replace('.weight', '.default.weight')}"] for name in table.names}
    for name, view in table.views(first).items():
        factors[name].data.copy_(view)
    adam = torch.optim.AdamW(factors.values(), betas=(train.beta1, train.beta2), weight_decay=train.weight_decay)
    context, count = manifest.model.context, train.batch_tokens // manifest.model.context
    readers = [BatchReader(corpus, context, manifest.run.seed, simulated_peer_id(slot)) for slot in range(PEERS)]
    for step in range(steps):
        adam.param_groups[0]["lr"] = train.learning_rate * learning_rate_scale(train, step)
        for reader in readers:
            windows = reader.next_batch(count)
            logits = model(windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / PEERS
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(factors.values(), train.clip)
        adam.step()
        adam.zero_grad()
    return torch.cat([factors[name].detach().flatten() for name in table.names])


def config_of(manifest: Manifest, steps: int) -> SimulationConfig:
    return SimulationConfig(manifest, Path(), PEERS, steps, (1.0,) * PEERS, (2.5e6,) * PEERS, 0.05)


def in_a_swarm(manifest: Manifest, corpus: Corpus, steps: int) -> SimulationResult:
    """Train the adapter with four virtual peers."""
    config = config_of(manifest, steps)
    return run_simulation(config, build_program(manifest).method, corpus, Evaluator(config, corpus), 1, lambda: None)


def in_one_process(manifest: Manifest, corpus: Corpus, steps: int) -> float:
    """Train the adapter with PEFT; returns the validation loss."""
    evaluator = Evaluator(config_of(manifest, steps), corpus)
    return evaluator.loss(train_with_peft(manifest, corpus, steps))


def search(base: Manifest, steps: int, recipe: str, rates: Sequence[float]) -> tuple[Rates, list[dict[str, float]]]:
    """Train the first seed at each rate; returns the best rate of each side, and all losses."""
    tried = []
    for rate in rates:
        manifest = adapted(base, 0, steps, rate, recipe)
        corpus = open_corpus(manifest.data, Path())
        swarm = in_a_swarm(manifest, corpus, steps).validation_loss
        tried.append({"rate": rate, "swarm": swarm, "peft": in_one_process(manifest, corpus, steps)})
        print(tried[-1], file=sys.stderr)
    best = {side: min(tried, key=itemgetter(side))["rate"] for side in ("swarm", "peft")}
    return Rates(**best), tried


def measure(base: Manifest, seed: int, steps: int, recipe: str, rates: Rates) -> Row:
    """Train one seed in both ways."""
    manifest = adapted(base, seed, steps, rates.swarm, recipe)
    corpus = open_corpus(manifest.data, Path())
    result, config = in_a_swarm(manifest, corpus, steps), config_of(manifest, steps)
    return Row(
        seed=seed,
        base=Evaluator(config, corpus).loss(config.start_weights()),
        swarm=result.validation_loss,
        peft=in_one_process(adapted(base, seed, steps, rates.peft, recipe), corpus, steps),
        bytes_a_peer=result.sent_bytes,
    )


def record(recipe: str, figures: dict[str, Any]) -> None:
    """Put the figures of a recipe in the place of earlier ones."""
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(recorded | {recipe: figures}, indent=1) + "\n")


def main() -> int:
    """Run all seeds; returns 1 if the swarm is too far from PEFT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="frugal")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=400, help="steps of the frozen model's own training")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.01, 0.02, 0.04])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="murmur-adapters-") as folder:
        base = make_base(Path(folder) / "base", options.base_steps)
        rates, tried = search(base, options.steps, options.recipe, options.rates)
        rows = [measure(base, seed, options.steps, options.recipe, rates) for seed in range(options.seeds)]
    mean = statistics.fmean(row.difference for row in rows)
    print(f"learning rates: {rates.swarm:g} in the swarm, {rates.peft:g} with PEFT")
    print("| seed | frozen model | swarm of four | PEFT and torch | difference | sent by a peer |")
    print(6 * "|---" + "|")
    for row in rows:
        cells = f"{row.base:.4f} | {row.swarm:.4f} | {row.peft:.4f} | {row.difference:+.2%}"
        print(f"| {row.seed} | {cells} | {row.bytes_a_peer / 1e3:.0f} kB |")
    print(f"mean difference: {mean:+.2%}")
    if options.record:
        measured = [asdict(row) | {"difference": row.difference} for row in rows]
        record(options.recipe, {"rates": tried, "best": asdict(rates), "rows": measured, "mean": mean})
    return 0 if mean <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())

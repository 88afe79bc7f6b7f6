"""An adapter trained by a swarm of four, and by PEFT and torch in one process on the same tokens.

    python -m benchmarks.adapters [--steps 120] [--seeds 3] [--json]

A small model is trained on the library of this Python first, and frozen. Its adapter then learns other text: the pages
of this repository. Four virtual peers train it with `frugal` on links of 20 Mbit/s; PEFT trains the same adapter from
the same factors, each step on the batches of all four peers together. Losses are those of the same held-out text, in
nats per token. The last column is the difference; exit code 1 if it is above 1 % for the mean of the seeds. About five
minutes a seed on two cores.
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
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
from node.simulation.measurement import Evaluator
from node.simulation.swarm import simulated_peer_id
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from optim.inner.adamw import AdamW
from protocol.manifest.run import Manifest

PEERS: Final = 4
MAX_DIFFERENCE: Final = 0.01
PAGES: Final = Path(__file__).parents[1] / "docs"
MODEL: Final = {"width": 96, "layers": 3, "heads": 4, "hidden": 256, "context": 64}
ADAPTER: Final = {"rank": 8, "alpha": 16.0, "base": "fp32"}


@dataclass
class Row:
    """Validation losses of one seed."""

    seed: int
    base: float
    swarm: float
    peft: float
    bytes_a_peer: float

    @property
    def difference(self) -> float:
        """Return the loss of the swarm above PEFT's, as a share of it."""
        return self.swarm / self.peft - 1


def manifest_of(seed: int, steps: int, data: dict[str, Any], rate: float, **more: Any) -> Manifest:
    return Manifest.model_validate(
        {
            "run": {"name": "adapters", "seed": seed},
            "model": MODEL,
            "data": data,
            "train": {"batch_tokens": 512, "learning_rate": rate, "warmup_steps": 5, "decay_steps": steps},
            "method": {"recipe": "frugal"},
            **more,
        }
    )


def make_base(folder: Path, steps: int) -> Manifest:
    """Train the model that is frozen, and write it as a folder of Hugging Face."""
    manifest = manifest_of(0, steps, {"source": "python-stdlib"}, 3e-3)
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


def adapted(base: Manifest, seed: int, steps: int) -> Manifest:
    data = {"source": "text", "path": str(PAGES / "**" / "*.md"), "validation_share": 0.1}
    more = {"adapter": ADAPTER, "model": base.model.model_dump(by_alias=True)}
    return manifest_of(seed, steps, data, 1e-2, **more)


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


def measure(base: Manifest, seed: int, steps: int) -> Row:
    """Train one seed in both ways."""
    manifest = adapted(base, seed, steps)
    corpus = open_corpus(manifest.data, Path())
    config = SimulationConfig(manifest, Path(), PEERS, steps, (1.0,) * PEERS, (2.5e6,) * PEERS, 0.05)
    evaluator = Evaluator(config, corpus)
    result = run_simulation(config, build_program(manifest).method, corpus, evaluator, 1, lambda: None)
    return Row(
        seed=seed,
        base=evaluator.loss(config.start_weights()),
        swarm=result.validation_loss,
        peft=evaluator.loss(train_with_peft(manifest, corpus, steps)),
        bytes_a_peer=result.sent_bytes,
    )


def main() -> int:
    """Run all seeds; returns 1 if the swarm is too far from PEFT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=400, help="steps of the frozen model's own training")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="murmur-adapters-") as folder:
        base = make_base(Path(folder) / "base", options.base_steps)
        rows = [measure(base, seed, options.steps) for seed in range(options.seeds)]
    mean = statistics.fmean(row.difference for row in rows)
    if options.json:
        print(json.dumps({"rows": [asdict(row) | {"difference": row.difference} for row in rows], "mean": mean}))
    else:
        print("| seed | frozen model | swarm of four | PEFT and torch | difference | sent by a peer |")
        print(6 * "|---" + "|")
        for row in rows:
            cells = f"{row.base:.4f} | {row.swarm:.4f} | {row.peft:.4f} | {row.difference:+.2%}"
            print(f"| {row.seed} | {cells} | {row.bytes_a_peer / 1e3:.0f} kB |")
        print(f"mean difference: {mean:+.2%}")
    return 0 if mean <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())

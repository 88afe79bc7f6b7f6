"""What a finished run is worth: the losses before and after, the model as a folder, a few lines of its own.

Needs torch; `node.local.report` does the arithmetic.
"""

import itertools
import shutil
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoints.checkpoint import load_trained_weights
from node.data.batches import validation_batches
from node.data.source import open_source
from node.export import export
from node.generate import generate
from node.local.report import ModelEvaluation
from node.model import Llama, initial_weights
from node.places import find_newest_checkpoint, find_trained_dir
from protocol.manifest import Manifest

VALIDATION_TOKENS = 65_536
SAMPLE_TOKENS = 200
SAMPLE_CHARACTERS = 240
PROMPTS = {"python-stdlib": "def "}
DEFAULT_PROMPT = "The "


def evaluate_model(manifest: Manifest, swarm_dir: Path) -> ModelEvaluation:
    """Reads the newest checkpoint below `swarm` and writes `swarm`/export anew. Raises MurmurError."""
    node = find_trained_dir(swarm_dir)
    trained = load_trained_weights(node)
    initial = initial_weights(manifest.model, manifest.run.seed)
    before, after = validation_losses(manifest, swarm_dir, initial, trained.anchor)
    exported = swarm_dir / "export"
    shutil.rmtree(exported, ignore_errors=True)
    export(node, exported)
    return ModelEvaluation(
        checkpoint=find_newest_checkpoint(node) or node,
        export=exported,
        rounds=trained.round,
        parameters=trained.anchor.numel(),
        initial_validation_loss=before,
        validation_loss=after,
        sample=sample_text(manifest, node),
    )


@torch.inference_mode()
def validation_losses(manifest: Manifest, base: Path, *weights: Tensor) -> list[float]:
    """Mean loss in nats a token over the held-out text, for each flat vector of weights."""
    batches = validation_batches(open_source(manifest.data, base), manifest.model.context, VALIDATION_TOKENS)
    model = Llama(manifest.model)
    losses = []
    for flat in weights:
        model.load_flat(flat)
        total = sum(model(batch[:, :-1], batch[:, 1:]).item() * len(batch) for batch in batches)
        losses.append(total / sum(len(batch) for batch in batches))
    return losses


def sample_text(manifest: Manifest, node_dir: Path) -> str:
    """The beginning of what the model makes of a usual prompt, the prompt included."""
    prompt = PROMPTS.get(manifest.data.source, DEFAULT_PROMPT)
    pieces = generate(node_dir, prompt, tokens=SAMPLE_TOKENS, temperature=0.7, top_k=40, seed=manifest.run.seed)
    return "".join(itertools.chain((prompt,), pieces))[:SAMPLE_CHARACTERS]

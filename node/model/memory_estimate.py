"""Estimates of a trainer's memory, computed from the manifest alone.

With an accelerator the estimate is for its memory; on a CPU it is for the trainer process, without the memory that it
shares with the daemon. A parameter needs space for its weight, gradient and moments, and for updates and contributions.
A sequence needs its activations, which the model family gives for 16 bits (twice that for 32), and half as much again
for the gated layer and the backward pass. The constants were measured and rounded up.
"""

from node.model.cut import WHOLE, Cut
from node.model.families import model_family, shape_table
from protocol.errors import DeviceError
from protocol.manifest import Manifest

PROCESS_BYTES = 250_000_000  # torch itself, in a trainer process on a CPU
BYTES_PER_PARAMETER = {"cpu": 44, "cuda": 24}
BYTES_PER_ACTIVATION = {"cpu": 4, "cuda": 2}
ACTIVATION_FACTOR = 1.5
MAX_MICROBATCH = 4096


def fixed_bytes(manifest: Manifest, device: str, cut: Cut = WHOLE) -> int:
    """Estimate the bytes that do not depend on the microbatch; `device` is "cpu" or "cuda"."""
    parameters = BYTES_PER_PARAMETER[device] * shape_table(manifest.model, cut).numel
    return parameters + (PROCESS_BYTES if device == "cpu" else 0)


def sequence_bytes(manifest: Manifest, device: str, cut: Cut = WHOLE) -> int:
    """Estimate the bytes of each sequence of a microbatch."""
    model = manifest.model
    family, blocks = model_family(model), shape_table(model, cut).blocks
    layers = len(blocks) - cut.has_embedding - cut.has_head
    activations = layers * family.layer_activation_bytes(model)
    logits = 2 * 4 * model.context * model.vocabulary if cut.has_head else 0
    return int(ACTIVATION_FACTOR * (activations * BYTES_PER_ACTIVATION[device] / 2 + logits))


def max_microbatch(manifest: Manifest, free_bytes: float, device: str) -> int:
    """Return how many sequences of one forward pass fit into `free_bytes`."""
    left = free_bytes - fixed_bytes(manifest, device)
    return min(MAX_MICROBATCH, max(0, int(left / sequence_bytes(manifest, device))))


def fit_microbatch(manifest: Manifest, memory_bytes: int | None, device: str) -> int:
    """Return the manifest's microbatch, or a smaller one that fits into `memory_bytes`.

    More passes then make up the same batch.

    Raises:
        DeviceError: not even one sequence fits.
    """
    if memory_bytes is None:
        return manifest.train.microbatch
    fits = max_microbatch(manifest, memory_bytes, device)
    if fits == 0:
        needed = (fixed_bytes(manifest, device) + sequence_bytes(manifest, device)) / 1e6
        raise DeviceError(
            f"--memory: {memory_bytes / 1e6:.0f} MB are too little for this run's model, "
            f"one sequence takes {needed:.0f} MB; allow {needed:.0f}MB, or join a smaller run"
        )
    return min(fits, manifest.train.microbatch)

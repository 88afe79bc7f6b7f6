"""What a trainer takes of a machine's memory, computed from the manifest. PURE.

On an accelerator that is its own memory; on a processor, what the trainer's process keeps for itself, beside what it
shares with the daemon. A parameter takes its weight, gradient, moments and what each update and message need
besides; a sequence takes the activations that the model family names in 16 bits, twice that in 32, and half as much
again for the gated layer and the backward pass. The constants are measured, rounded up.
"""

from node.model.families import model_family, shape_table
from protocol.errors import DeviceError
from protocol.manifest import Manifest

PROCESS_BYTES = 250_000_000  # torch itself, in the process of a trainer without an accelerator
BYTES_PER_PARAMETER = {"cpu": 44, "cuda": 24}
BYTES_PER_ACTIVATION = {"cpu": 4, "cuda": 2}
ACTIVATION_FACTOR = 1.5
MAX_MICROBATCH = 4096


def fixed_bytes(manifest: Manifest, device: str) -> int:
    """Before the first sequence. `device`: "cpu" or "cuda"."""
    parameters = BYTES_PER_PARAMETER[device] * shape_table(manifest.model).numel
    return parameters + (PROCESS_BYTES if device == "cpu" else 0)


def sequence_bytes(manifest: Manifest, device: str) -> int:
    """For each sequence of a microbatch."""
    model = manifest.model
    activations = model_family(model).activation_bytes(model)
    logits = 2 * 4 * model.context * model.vocabulary
    return int(ACTIVATION_FACTOR * (activations * BYTES_PER_ACTIVATION[device] / 2 + logits))


def max_microbatch(manifest: Manifest, free_bytes: float, device: str) -> int:
    """How many sequences of one forward pass fit into so many bytes; 0: not even one."""
    left = free_bytes - fixed_bytes(manifest, device)
    return min(MAX_MICROBATCH, max(0, int(left / sequence_bytes(manifest, device))))


def fit_microbatch(manifest: Manifest, memory_bytes: int | None, device: str) -> int:
    """The manifest's microbatch, or a smaller one that keeps to `memory` bytes: more passes make up the same batch.

    Raises DeviceError where not even one sequence fits.
    """
    if memory_bytes is None:
        return manifest.train.microbatch
    fits = max_microbatch(manifest, memory_bytes, device)
    if fits == 0:
        needed = (fixed_bytes(manifest, device) + sequence_bytes(manifest, device)) / 1e6
        raise DeviceError(
            f"--memory: {memory_bytes / 1e6:.0f} MB are too little for this run's model, "
            f"one sequence takes {needed:.0f} MB; "
            f"allow {needed:.0f}MB, or join a smaller run"
        )
    return min(fits, manifest.train.microbatch)

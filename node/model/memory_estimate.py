"""Estimates of a trainer's memory, computed from the manifest alone.

With an accelerator the estimate is for its memory; on a CPU it is for the trainer process, without the memory that it
shares with the daemon. A parameter needs space for its weight, gradient and moments, and for updates and contributions.
A sequence needs its activations, which the model family gives for 16 bits (twice that for 32), and half as much again
for the gated layer and the backward pass. The constants were measured and rounded up.

A node of a pipeline holds one stage. Without a `cut` the functions are about the stage of the manifest, or about the
smallest one if the node has none yet.
"""

from node.model.cut import Cut
from node.model.families import model_family, shape_table, smallest_cut
from protocol.errors import DeviceError
from protocol.manifest import Manifest

PROCESS_BYTES = 250_000_000  # torch itself, in a trainer process on a CPU
BYTES_PER_PARAMETER = {"cpu": 44, "cuda": 24}
BYTES_PER_ACTIVATION = {"cpu": 4, "cuda": 2}
ACTIVATION_FACTOR = 1.5
MAX_MICROBATCH = 4096


def fixed_bytes(manifest: Manifest, device: str, cut: Cut | None = None) -> int:
    """Estimate the bytes that do not depend on the microbatch; `device` is "cpu" or "cuda"."""
    parameters = BYTES_PER_PARAMETER[device] * shape_table(manifest.model, cut or smallest_cut(manifest)).numel
    return parameters + (PROCESS_BYTES if device == "cpu" else 0)


def sequence_bytes(manifest: Manifest, device: str, cut: Cut | None = None) -> int:
    """Estimate the bytes of each sequence of a microbatch."""
    model, cut = manifest.model, cut or smallest_cut(manifest)
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

    More passes then make up the same batch. A microbatch that travels through stages has one size.

    Raises:
        DeviceError: not even one sequence fits, or not a whole microbatch of a pipeline.
    """
    wanted, least = run_microbatch(manifest)
    if memory_bytes is None:
        return wanted
    fits = max_microbatch(manifest, memory_bytes, device)
    if fits < least:
        needed = (fixed_bytes(manifest, device) + least * sequence_bytes(manifest, device)) / 1e6
        raise DeviceError(
            f"--memory: {memory_bytes / 1e6:.0f} MB are too little for this run's model, "
            f"{'one sequence' if least == 1 else f'a microbatch of {least}'} takes {needed:.0f} MB; "
            f"allow {needed:.0f}MB, or join a smaller run"
        )
    return min(fits, wanted)


def run_microbatch(manifest: Manifest) -> tuple[int, int]:
    """Return the sequences of the run's microbatches, and the fewest that a machine must be able to compute."""
    size = manifest.pipeline.microbatch
    return (size, size) if manifest.pipeline.is_cut else (manifest.train.microbatch, 1)

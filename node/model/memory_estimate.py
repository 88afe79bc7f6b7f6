"""Estimates of a trainer's memory, computed from the manifest alone.

With an accelerator the estimate is for its memory; on a CPU it is for the trainer process, without the memory that it
shares with the daemon, in which weights, gradient and moments are. An accelerator has these itself. A parameter also
needs space for updates and contributions.
A sequence needs its activations, which the model family gives for 16 bits (twice that for 32), and half as much again
for the gated layer and the backward pass; with `recompute` it keeps a part of them, and all of one layer. The logits
are those of a chunk of tokens. The constants were measured and rounded up.

Several ranks hold a part of everything each, wherever they compute. A rank needs room for what is gathered besides: the
embedding and the head, and two layers.

An adapter's model has its frozen weights besides, in the run's type (`node.model.adapter`).

A node of a pipeline holds one stage. Without a `cut` the functions are about the stage of the manifest, or about the
smallest one if the node has none yet.
"""

from bisect import bisect_right

from node.model.adapter import frozen_bytes, is_projection
from node.model.families import model_family, shape_table, smallest_cut
from node.model.interface import Recompute, chunk_tokens
from node.model.shapes import Cut, ShapeTable
from protocol.errors import DeviceError
from protocol.manifest.run import Manifest

PROCESS_BYTES = 250_000_000  # torch itself, in a trainer process on a CPU
BYTES_PER_PARAMETER = {"cpu": 12, "cuda": 24, "mps": 24}
SMALL_MOMENTS_SAVE = 6  # bytes a parameter on an accelerator
GATHERED_BYTES_PER_PARAMETER = 12  # weights and gradient of a part that is whole for a while, and a buffer
BYTES_PER_ACTIVATION = {"cpu": 4, "cuda": 2, "mps": 4}
ACTIVATION_FACTOR = 1.5
MAX_MICROBATCH = 4096


def fixed_bytes(manifest: Manifest, device: str, cut: Cut | None = None, ranks: int = 1) -> int:
    """Estimate the bytes of each rank that do not depend on the microbatch; `device` is "cpu", "cuda" or "mps"."""
    table = shape_table(manifest.model, cut or smallest_cut(manifest))
    process = (PROCESS_BYTES if device == "cpu" else 0) + adapted_bytes(manifest, device)
    if ranks > 1:
        return BYTES_PER_PARAMETER["cuda"] * table.numel // ranks + _gathered_bytes(table) + process
    saved = SMALL_MOMENTS_SAVE if manifest.train.memory == "small" and device != "cpu" else 0
    return (BYTES_PER_PARAMETER[device] - saved) * table.numel + process


def adapted_bytes(manifest: Manifest, device: str = "cpu") -> int:
    """Estimate the bytes of the weights that an adapter changes, and of those that are expanded at the same time.

    On a CPU that is the largest block in fp32, while it is read; on an accelerator the largest matrix, in 16 bits.
    """
    if manifest.adapter is None:
        return 0
    table = shape_table(manifest.model.with_adapter(None))
    blocks = [stop - start for start, stop in table.layout.block_spans]
    matrices = [size for name, size in zip(table.names, table.sizes, strict=True) if is_projection(name)]
    expanded = 4 * max(blocks) if device == "cpu" else 2 * max(matrices)
    return frozen_bytes(table.entries, manifest.adapter.base) + expanded


def _gathered_bytes(table: ShapeTable) -> int:
    """Estimate the bytes of the blocks that a rank has whole at the same time: the first, the last, and two others."""
    sizes = [stop - start for start, stop in table.layout.block_spans]
    return GATHERED_BYTES_PER_PARAMETER * (sizes[0] + sizes[-1] + 2 * max(sizes[1:-1], default=0))


def microbatch_bytes(
    manifest: Manifest, sequences: int, device: str, cut: Cut | None = None, recompute: Recompute = "none"
) -> int:
    """Estimate the bytes of a microbatch of `sequences`."""
    model, cut = manifest.model, cut or smallest_cut(manifest)
    family, blocks = model_family(model), shape_table(model.with_adapter(None), cut).blocks
    layers = len(blocks) - cut.has_embedding - cut.has_head
    activations = layers * family.kept_bytes(model, recompute)
    if recompute != "none":  # the layer that runs again
        activations += family.layer_activation_bytes(model)
    tokens = sequences * model.context
    at_once = min(tokens, chunk_tokens(tokens, model.vocabulary, device)) if cut.has_head else 0
    logits = 2 * 4 * at_once * model.vocabulary
    return int(ACTIVATION_FACTOR * (sequences * activations * BYTES_PER_ACTIVATION[device] / 2 + logits))


def max_microbatch(
    manifest: Manifest, free_bytes: float, device: str, recompute: Recompute = "none", ranks: int = 1
) -> int:
    """Return how many sequences of one forward pass fit into `free_bytes` of each rank."""
    left = free_bytes - fixed_bytes(manifest, device, ranks=ranks)
    sizes = range(1, MAX_MICROBATCH + 1)
    return bisect_right(sizes, left, key=lambda size: microbatch_bytes(manifest, size, device, recompute=recompute))


def fit_microbatch(
    manifest: Manifest, memory_bytes: int | None, device: str, recompute: Recompute = "none", ranks: int = 1
) -> int:
    """Return the manifest's microbatch, or a smaller one that fits into `memory_bytes` of each rank.

    More passes then make up the same batch. A microbatch that travels through stages has one size.

    Raises:
        DeviceError: not even one sequence fits, or not a whole microbatch of a pipeline.
    """
    wanted, least = run_microbatch(manifest)
    if memory_bytes is None:
        return wanted
    fits = max_microbatch(manifest, memory_bytes, device, recompute, ranks)
    if fits < least:
        activations = microbatch_bytes(manifest, least, device, recompute=recompute)
        needed = (fixed_bytes(manifest, device, ranks=ranks) + activations) / 1e6
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

"""A model of a billion parameters in four stages, and peers, for tests of plans."""

from collections.abc import Sequence
from typing import Any

from node.commands.plan.peers import PeerKind
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest

TOML = """
[run]
name = "billion"
[model]
vocabulary = 256
width = {width}
layers = {layers}
heads = 16
hidden = {hidden}
context = {context}
tied = false
[data]
source = "python-stdlib"
[train]
batch_tokens = {batch_tokens}
learning_rate = 1e-3
[pipeline]
stages = {stages}
microbatch = 1
in_flight = {in_flight}
activations = "{activations}"
memory = {memory}
speeds = {speeds}
[method]
recipe = "{recipe}"
"""


def run_of(**changes: Any) -> Manifest:
    """Return a manifest whose stages have 4 layers of width 2048, with 12 width^2 elements each."""
    width, context = changes.get("width", 2048), changes.get("context", 2048)
    values = {
        "width": width, "layers": 16, "hidden": round(8 / 3 * width), "context": context, "stages": 4,
        "batch_tokens": 64 * context, "in_flight": 24, "activations": "bf16", "memory": 2**32, "recipe": "frugal",
        **changes, "speeds": list(changes.get("speeds", ())),
    }  # fmt: skip
    return parse_manifest(TOML.format(**values).encode(), "test")


def peer(**changes: Any) -> PeerKind:
    values = {"name": "card", "count": 12, "tflops": 20.0, "up": "100mbit", "down": "100mbit", "memory": "24GB"}
    return PeerKind.model_validate({**values, **changes})


def peers(speeds: Sequence[float], **changes: Any) -> tuple[PeerKind, ...]:
    """Return four peers of each speed, one for each stage of `run_of()`."""
    return tuple(peer(name=f"speed {speed}", tflops=speed, count=4, **changes) for speed in speeds)

"""Count what became of microbatches, for the status of a node."""

from protocol.pipeline.owner_events import OwnerCounts
from protocol.pipeline.stages.server_events import ServerCounts

OWN_COUNTS = ("done", "torn", "lost", "duplicates", "replayed", "void")
SERVED_COUNTS = (
    *("computed", "steps", "struck", "torn", "lost", "duplicates", "replayed", "invalid"),
    "subtracted",
)


def count_microbatches(own: OwnerCounts, served: ServerCounts | None) -> dict[str, int]:
    """Return the counts of our own microbatches and of those that we serve, by result."""
    served = served or ServerCounts()
    counts: dict[str, int] = {name: getattr(own, name) for name in OWN_COUNTS}
    counts |= {f"dropped: {reason}": count for reason, count in own.dropped.items()}
    return counts | {f"served: {name}": getattr(served, name) for name in SERVED_COUNTS}

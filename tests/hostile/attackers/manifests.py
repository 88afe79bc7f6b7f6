"""Attacks 13 and 13b: a person joins the run of a hostile organiser, whose manifest asks for too much."""

import asyncio
import os

from protocol.errors import ManifestError, MurmurError
from protocol.manifest import reading
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import Section
from tests.hostile.attackers.stranger import Stranger

HUGE_WIDTH = 2**15
HUGE_LAYERS = 64


async def oversized_manifest(stranger: Stranger) -> None:
    """Attack 13: a model that no machine holds; the arena is not allocated for real, but what it asks for is noted."""
    stranger.note(gigabytes=0.0)
    stranger.begin()
    tables = stranger.manifest.model_dump(mode="json", exclude_none=True)
    tables["model"] |= {"width": HUGE_WIDTH, "layers": HUGE_LAYERS, "heads": 64, "hidden": 4 * HUGE_WIDTH}
    huge = Manifest.model_validate(tables, strict=False)
    try:
        await asyncio.to_thread(_prepare, stranger, huge)
    except (MurmurError, MemoryError) as error:
        print(f"refused: {error}", flush=True)


def _prepare(stranger: Stranger, manifest: Manifest) -> None:
    """Do what `murmur join` does before it trains: check the room, then create the shared memory."""
    from node.commands import capacity
    from node.from_manifest import build_program
    from node.options import NodeOptions
    from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory

    def note_allocation(descriptor: int, offset: int, length: int) -> None:
        stranger.note(gigabytes=length / 1e9)
        raise MemoryError(f"{length} bytes")

    os.posix_fallocate = note_allocation
    options = NodeOptions(manifest=manifest, base=stranger.home, folder=stranger.home / "joined")
    if "room" not in stranger.options["rules_off"]:
        capacity.require_capacity(options, is_downloaded=True)
    SharedMemory.create(SharedLayout.of(build_program(manifest)))


async def extreme_manifest(stranger: Stranger) -> None:
    """Attack 13b: a heartbeat of a nanosecond; accepted, it would keep a core busy."""
    text = stranger.manifest.to_toml().replace("heartbeat = 0.3", "heartbeat = 1e-9").encode()
    if "manifest-bounds" in stranger.options["rules_off"]:
        _loosen_bounds()
    accepted = 0
    try:
        accepted = int(parse_manifest(text, "hostile.toml").membership.heartbeat < 1e-6)
    except ManifestError as error:
        print(f"refused: {error}", flush=True)
    stranger.note(accepted=accepted)
    stranger.begin()


def _loosen_bounds() -> None:
    class LooseSection(Section):
        heartbeat: float
        expiry: float

    class LooseManifest(Manifest):
        membership: LooseSection  # type: ignore[assignment]

    reading.Manifest = LooseManifest  # type: ignore[attr-defined, assignment]

"""Everything that peers put where others can fetch it, kept by a third party: what a run says can be computed again."""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from node.daemon.peers.peer_rpc import request_chain
from node.daemon.run_limits import contribution_limits
from node.daemon.state.outer_state import RoundCompute
from node.from_manifest import build_program
from protocol.blobs.blob import DIGEST_BYTES
from protocol.blobs.store import BlobStore
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.kinds import parse
from protocol.manifest.run import Manifest
from protocol.transport.transport import Transport
from tests.netlab.lab.laboratory import Laboratory, Node

POLL_SECONDS = 0.02  # seconds; a contribution lies in its owner's store for a round
MAX_BYTES = 1 << 30


class BlobArchive:
    """Keeps a second name for every blob in the peers' folders while it is entered."""

    def __init__(self, folder: Path, manifest: Manifest, peers: Sequence[Path]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._peers = peers
        self._program = build_program(manifest)
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._link_new_blobs, name="archive")

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()

    def _link_new_blobs(self) -> None:
        kept: set[str] = set()
        while not self._stop.wait(POLL_SECONDS):
            for peer in self._peers:
                for name in set(os.listdir(peer / "blobs")) - kept:
                    if len(name) == 2 * DIGEST_BYTES:
                        with contextlib.suppress(FileNotFoundError, FileExistsError):
                            os.link(peer / "blobs" / name, self._folder / name)
                        kept.add(name)

    def request_commits(self, laboratory: Laboratory, node: Node, address: str, after_round: int) -> list[Commit]:
        """Those of the peer at that address, asked from `node`; none where its log does not reach back so far."""
        terms = contribution_limits(self._manifest, self._program)

        async def ask() -> list[Commit]:
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                transport = await Transport.start(home / "key", home, [], listen=[f"/ip4/{node.address}/tcp/0"])
                try:
                    peer, run = await transport.connect(address, 10.0), self._manifest.run_id
                    reply = await request_chain(run, transport.channel, peer, after_round)
                    bodies = [parse(signed, run, terms).body for signed in reply.log.commits]
                    return [body for body in bodies if isinstance(body, Commit)]
                finally:
                    await transport.stop()

        with laboratory.inside(node):
            return asyncio.run(ask())

    def make_round_compute(self) -> RoundCompute:
        """It computes from what is kept here."""
        return RoundCompute(self._program, BlobStore(self._folder, MAX_BYTES), lambda *_: 1.0)

    def has_all(self, contributions: Sequence[Contribution]) -> bool:
        return all((self._folder / part.digest.hex()).exists() for given in contributions for part in given.parts)

"""Fetch the inputs of tasks from their makers into slots."""

import asyncio
import logging
from collections.abc import Iterable

from node.daemon.stages.activation_store import ActivationStore
from node.daemon.stages.node_stages import NodeStages
from protocol.blobs.download import Downloader
from protocol.errors import GoneError, MalformedError, MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.pipeline.messages import HeldBlob, Input, Inputs, Key

FETCH_SECONDS = 60.0
UNKNOWN_HOLDER_SECONDS = 5.0  # for a holder that is gone, or whose record has not come yet
FETCH_ERRORS = (UnreachableError, PeerFault, MissingFileError, StorageError)
logger = logging.getLogger(__name__)


class ActivationFetcher:
    """Downloads from one holder for each blob. If that holder leaves, nobody else has it, and the download ends."""

    def __init__(self, node: NodeStages, downloader: Downloader, activations: ActivationStore) -> None:
        self._node = node
        self._directory = node.directory
        self._downloader = downloader
        self._activations = activations
        self._running: dict[PeerId, set[asyncio.Task[None]]] = {}

    async def fetch(self, key: Key, inputs: Iterable[tuple[Input, HeldBlob]]) -> Input | None:
        """Bring the inputs of a task into slots; return the name of one that is missing."""
        for name, held in inputs:
            if not await self._fetch_one(key, held):
                return name
        return None

    def blame_holders(self, inputs: Inputs) -> None:
        """Count an input that is malformed or not finite against the other peers that had inputs."""
        for holder in {held.holder for held in inputs.named().values()} - {self._directory.peer_id}:
            fault = MalformedError("an activation with a value that is not allowed")
            self._directory.record_refusal(holder, fault)

    def drop_peer(self, peer: PeerId) -> None:
        """End the downloads from a peer that is gone."""
        for task in self._running.get(peer, ()):
            task.cancel()

    async def _fetch_one(self, key: Key, held: HeldBlob) -> bool:
        activations, blob = self._activations, held.blob
        if activations.has(blob.digest):
            activations.hold(key, blob.digest)
            return True
        if held.holder == self._directory.peer_id:
            content = self._node.view(blob.digest)
            if content is not None:
                activations.copy(key, blob, content)
            return content is not None
        try:
            await self._download(held)
            activations.take_over(key, blob)
        except FETCH_ERRORS as error:
            logger.info("an activation of %s is missing: %s", held.holder, error)
            return False
        return True

    async def _download(self, held: HeldBlob) -> None:
        """Download a blob from its holder. Raises one of FETCH_ERRORS."""

        def holders() -> list[PeerId]:
            return [held.holder]

        seconds = FETCH_SECONDS if held.holder in self._directory.live() else UNKNOWN_HOLDER_SECONDS
        fetching = self._downloader.fetch(held.blob, holders, seconds, wait_if_absent=False)
        task = asyncio.create_task(fetching, name=f"activation {held.blob.name[:12]}")
        running = self._running.setdefault(held.holder, set())
        running.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise GoneError(f"{held.holder} has left")
            await task
        finally:
            task.cancel()
            running.discard(task)
            if not running:
                self._running.pop(held.holder, None)

"""Compute the newest state from an older one and the commits between them, as trainers do, but without a trainer.

The commits are certified before they come here (`state_store.py`). All peers apply them with the same operations, so
the digest of the result must be the one that the trainers announce.
"""

from collections.abc import Callable, Sequence

from node.daemon.state.outer_state import OuterState, RoundCompute, SignedContributions, blobs_to_apply
from node.daemon.stored_states.state_folder import StateFolder
from node.from_manifest import rate_of_outer_steps, round_settings_by_number
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.loop.steering import Steering
from node.processes.workers import RunInThread
from optim.kernels.warmup import warm_up
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.chain import CertifiedCommit, ChainHead, extend_head
from protocol.errors import MalformedError, StaleError
from protocol.identity import PeerId


class CommitReplay:
    """Applies commits to a stored state.

    Args:
        planner: the run's method.
        steering: the manifest of each round; the revisions of the commits are known to it.
        folder: of the states, and of the blobs that the commits name.
        downloader: fetches these blobs.
        peer_id: our own id.
        run_in_thread: runs one computation at a time.
    """

    def __init__(
        self, planner: RoundPlanner, steering: Steering, folder: StateFolder, downloader: Downloader, peer_id: PeerId,
        run_in_thread: RunInThread,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._folder = folder
        self._downloader = downloader
        self._peer_id = peer_id
        self._run_in_thread = run_in_thread
        self._settings = round_settings_by_number(steering, planner)
        self._compute = RoundCompute(planner, folder.store, rate_of_outer_steps(steering, planner))
        self._is_warm = False

    async def apply(
        self, head: ChainHead, state: Blob, commits: Sequence[CertifiedCommit], holders: Callable[[], Sequence[PeerId]]
    ) -> Blob:
        """Store and return the state after the commits, which continue `head`.

        Raises StaleError if they are none or too many, UnreachableError if their blobs are gone, or PeerFault.
        """
        if not 0 < len(commits) <= RETAINED_ROUNDS or commits[0].body.base != head.digest:
            raise StaleError(f"{len(commits)} commits do not lead from round {head.round} to the newest state")
        if not self._is_warm:
            await self._run_in_thread(warm_up, self._planner.method)
            self._is_warm = True
        outer = await self._run_in_thread(self._folder.map_state, state)
        for commit in commits:
            contributions = await self._obtain(commit, holders)
            outer = await self._run_in_thread(
                self._compute.apply_commit, outer, commit.body, contributions, head.tokens
            )
            head = extend_head(head, commit.body)
        stored: Blob = await self._run_in_thread(self._store, outer)
        return stored

    async def _obtain(self, commit: CertifiedCommit, holders: Callable[[], Sequence[PeerId]]) -> SignedContributions:
        """Return the contributions of a commit, with their blobs in the store."""
        body, settings = commit.body, self._settings(commit.body.round)
        if not settings.topology.accepts_commit(body):
            raise MalformedError(f"the commit is not valid for round {body.round} of this run")
        contributions = settings.topology.contributions_for(body, self._peer_id)
        for blob in blobs_to_apply(body, contributions) if contributions else ():
            await self._downloader.fetch(blob, holders, settings.exchange_timeout, wait_if_absent=False)
        return contributions

    def _store(self, state: OuterState) -> Blob:
        return self._folder.store.put(*state.byte_views())

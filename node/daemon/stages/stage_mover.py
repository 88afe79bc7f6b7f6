"""Move this node to another stage when the pipeline needs it there; `protocol.pipeline.balance` decides it."""

import asyncio
import time
from collections.abc import Sequence

from node.daemon.stages.stage_peers import list_seats
from protocol.consensus.history.chain import Chain
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import MembershipEvent
from protocol.pipeline.balance import PINNED, Balancer, Move
from protocol.pipeline.stages.stage import StageManifest

POLL_SECONDS = 0.2  # between two looks at the chain


class StageMover:
    """Watches the records of all peers for a node that serves one stage. `chain`: that of its replica."""

    def __init__(self, directory: PeerDirectory, manifest: StageManifest, chain: Chain, has_moved: bool) -> None:
        self._directory = directory
        self._stages = manifest.pipeline.stages
        self._chain = chain
        self._balancer = Balancer(directory.peer_id, self._stages, manifest.membership.expiry)
        self._shown = PINNED
        if has_moved:
            self._balancer.rest(time.monotonic())
        directory.subscribe(self)

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Take over who serves which stage."""
        self._balancer.observe(list_seats(self._directory.live(), self._stages), time.monotonic())

    async def run(self) -> Move:
        """Wait until this node has to move, and return the move. Call it on the network."""
        last_round = self._chain.round
        while True:
            if self._shown != self._balancer.move:
                self._shown = self._balancer.move
                self._directory.publish(urgent=True, stage_move=self._shown)
            await asyncio.sleep(POLL_SECONDS)
            if self._chain.round == last_round:
                continue
            last_round = self._chain.round
            move = self._balancer.on_commit(list_seats(self._directory.live(), self._stages), time.monotonic())
            if move is not None:
                return move

"""The reasons for which a peer opens no round: the organiser's pause, and another stage of the pipeline. PURE."""

from node.loop import reports
from node.loop.actions import LoopAction, ReportPhase, SetResting
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from node.loop.steering import Steering
from protocol.consensus.history.chain import Chain


class Holds:
    """The reasons that hold the next round of a chain; in some, the trainer rests meanwhile."""

    def __init__(self, steering: Steering, chain: Chain) -> None:
        self._steering = steering
        self._chain = chain
        self._is_resting = False

    def pause(self, snapshot: SwarmSnapshot) -> list[LoopAction]:
        """Return what to do while the organiser has paused the run.

        A stage of a pipeline goes on serving while another one has not reached the pause.
        """
        actions: list[LoopAction] = []
        is_paused = self._steering.is_paused and not self.stage_behind(snapshot)
        if is_paused != self._is_resting:
            self._is_resting = is_paused
            actions.append(SetResting(is_paused))
        if is_paused:
            actions.append(ReportPhase("paused", f"paused by the organiser since round {self._chain.round}"))
        return actions

    def stage_behind(self, snapshot: SwarmSnapshot) -> list[LoopAction]:
        """Return the report that another stage is behind: stages are at most one round apart."""
        others = snapshot.other_stages
        if others is None or others >= self._chain.round:
            return []
        return [ReportPhase("waiting for peers", reports.stage_behind(others))]

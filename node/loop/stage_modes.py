"""The two modes of a pipeline's steps, as strategies of the stage loop. PURE.

In `local` mode each server makes an inner step whenever it has the gradients of one. In `exact` mode a round is a step
of numbered microbatches, each of which counts exactly once at each stage: `protocol.pipeline.exact` decides which of
them this peer begins and when it offers its sum. All state of a round is dropped when the round is over.
"""

from collections.abc import Collection
from dataclasses import dataclass

from node.loop.stage_events import (
    PeersSeen,
    StageAction,
    StageAnchorApplied,
    StageContributed,
    StagePeers,
    TrainerReady,
)
from protocol.identity import PeerId
from protocol.pipeline import owner_events
from protocol.pipeline.exact import OfferStep, SendStatement, Statement, StepAgreement
from protocol.pipeline.ledger import Ledger, StepLedger
from protocol.pipeline.microbatch import ExactPart
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.server import StageServer
from protocol.pipeline.stage import StageSettings
from protocol.pipeline.steps import ExactSteps, LocalSteps


@dataclass(frozen=True)
class Draw:
    """A microbatch to read; exact steps set its number and the window of the run's text where it begins."""

    number: int | None = None
    window: int | None = None


class LocalMode:
    """Each server steps independently; an owner draws microbatches up to its in-flight limit."""

    ends_with_round = False  # whether the end of a round drops open microbatches

    def build_server(self, settings: StageSettings, life: int, round_number: int, now: float) -> StageServer:
        return StageServer(LocalSteps(settings, Ledger()), life, round_number)

    def on_trainer(
        self, event: TrainerReady | StageAnchorApplied | StageContributed, drawing: Collection[int], now: float
    ) -> None:
        """Record the trainer's report; a new trainer will not draw the serials in `drawing`."""

    def leaves_chain(self, anchor_round: int, current_round: int) -> bool:
        """Return whether an anchor belongs to another chain, which voids computed gradients."""
        return False

    def begin_round(self) -> None:
        """Forget our microbatches of the previous round."""

    def freeze_sum(self, now: float) -> None:
        """Freeze the sum of the round if its contribution exists."""

    def set_peers(self, seen: PeersSeen, us: StagePeer, is_resting: bool) -> None:
        """Update the servers of all stages; `us` is this peer at its stage and round."""

    def routes(self, stages: StagePeers) -> StagePeers:
        """Return the servers to which this peer sends its microbatches."""
        return stages

    def record(self, peer: PeerId, statement: Statement, now: float) -> None:
        """Record another server's statement about its sum."""

    def draws(self, room: int, now: float) -> list[Draw]:
        """Return the microbatches to draw now, at most `room`."""
        return [Draw()] * room

    def start_draw(self, serial: int, draw: Draw, now: float) -> None:
        """Record that the trainer draws a microbatch."""

    def may_begin(self, serial: int, room: int) -> bool:
        """Return whether a drawn microbatch is still wanted."""
        return True

    def part_of(self, serial: int, round_number: int) -> ExactPart | None:
        """Return the part of a microbatch in the exact step."""
        return None

    def on_finished(self, ended: owner_events.Finished, now: float) -> None:
        """Record the end of one of our microbatches."""

    def settle(self, server: StageServer, now: float) -> list[StageAction]:
        """Return the pending actions of the agreement."""
        return []

    def next_deadline(self) -> float | None:
        """Return when `draws` or `settle` may change without an event."""
        return None


class ExactMode(LocalMode):
    """Count each of the `agreement.count` microbatches of a step once at each stage.

    Args:
        stage: the stage that this peer serves.
        sequences: number of sequences in a microbatch.
    """

    ends_with_round = True

    def __init__(self, agreement: StepAgreement, stage: int, sequences: int) -> None:
        self.agreement = agreement
        self._stage = stage
        self._sequences = sequences
        self._step = 0
        self._offer: tuple[int, StepLedger] | None = None  # round and ledger of our last contribution
        self._numbers: dict[int, int] = {}  # our microbatches that are drawn or in flight, by serial

    def build_server(self, settings: StageSettings, life: int, round_number: int, now: float) -> StageServer:
        self.agreement.begin(round_number, life, now)
        return StageServer(ExactSteps(settings, self.agreement), life, round_number)

    def on_trainer(
        self, event: TrainerReady | StageAnchorApplied | StageContributed, drawing: Collection[int], now: float
    ) -> None:
        match event:
            case TrainerReady():
                self._step = event.exact_step
                for serial in drawing:
                    self._numbers.pop(serial, None)
            case StageAnchorApplied():
                self._step = event.exact_step
            case StageContributed():
                self._offer = event.round, StepLedger.from_bytes(event.ledger, self.agreement.count)
                self.freeze_sum(now)

    def leaves_chain(self, anchor_round: int, current_round: int) -> bool:
        return anchor_round <= current_round

    def begin_round(self) -> None:
        self._numbers.clear()

    def freeze_sum(self, now: float) -> None:
        # A restarted peer repeats its contribution, and may reach the contribution's round only later.
        if self._offer is not None and self._offer[0] == self.agreement.round:
            self.agreement.offered(self._offer[1], now)

    def set_peers(self, seen: PeersSeen, us: StagePeer, is_resting: bool) -> None:
        lives = [{entry.peer: entry.life for entry in peers} for peers in seen.stages]
        lives[self._stage][us.peer] = us.life
        owners = {entry.peer for peers in seen.stages for entry in peers if self._owns(entry, us.round)} - {us.peer}
        # Before we see anybody, others may own all microbatches of the step.
        if any(seen.stages) and not is_resting:
            owners |= {us.peer}
        # A free key would own as many as a peer that works. Where nobody has standing, all may begin.
        standing = owners if seen.standing is None else owners & seen.standing
        self.agreement.set_peers(lives, standing or owners, seen.standing)
        self.agreement.take_reports(seen.reports)

    def routes(self, stages: StagePeers) -> StagePeers:
        """Return the servers whose word on their sums counts, where there are any."""
        agreement = self.agreement
        return tuple(
            tuple(entry for entry in peers if agreement.is_believed(stage, entry.peer))
            for stage, peers in enumerate(stages)
        )

    def _owns(self, entry: StagePeer, round_number: int) -> bool:
        # A peer that is far behind cannot own microbatches of this step; its record may be a round late.
        return not entry.draining and entry.round >= round_number - 1

    def record(self, peer: PeerId, statement: Statement, now: float) -> None:
        self.agreement.record(peer, statement, now)

    def draws(self, room: int, now: float) -> list[Draw]:
        wanted = self.agreement.wanted(set(self._numbers.values()), now)[:room]
        first = self._step * self.agreement.count
        return [Draw(number, (first + number) * self._sequences) for number in wanted]

    def start_draw(self, serial: int, draw: Draw, now: float) -> None:
        if draw.number is not None:
            self._numbers[serial] = draw.number
            self.agreement.progress.start(draw.number, now)

    def may_begin(self, serial: int, room: int) -> bool:
        if serial in self._numbers and room > 0:
            return True
        self._numbers.pop(serial, None)
        return False

    def part_of(self, serial: int, round_number: int) -> ExactPart | None:
        number = self._numbers[serial]
        return ExactPart(round_number, number, self.agreement.counted_at(number))

    def on_finished(self, ended: owner_events.Finished, now: float) -> None:
        number = self._numbers.pop(ended.serial, None)
        if number is None:
            return
        self.agreement.acknowledge(number, ended.added, now)
        if ended.reason is not None:
            self.agreement.postpone(number, now)

    def settle(self, server: StageServer, now: float) -> list[StageAction]:
        actions = list[StageAction]()
        for action in self.agreement.advance(now):
            match action:
                case SendStatement():
                    actions.append(action)
                case OfferStep(doubles) if isinstance(server.steps, ExactSteps):
                    server.steps.offer(doubles, now)
                    actions += server.advance(now)
        return actions

    def next_deadline(self) -> float | None:
        return self.agreement.next_deadline()

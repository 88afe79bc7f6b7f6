"""One peer of a pipeline whose steps are exact: every microbatch of a step counts exactly once at each stage.

`protocol.pipeline.exact.settlement` decides which microbatches this peer begins, and when its sum is offered. A round
is a step; whatever belongs to it is dropped when the round is over.
"""

import time
from collections.abc import Iterable

from node.daemon.stages.parts import PipelineParts
from node.daemon.stages.pipeline import Pipeline
from node.daemon.stages.stage_peers import stage_peers
from node.trainer.ipc.channel import AnchorApplied, ContributionHeader, FromTrainer, Ready
from node.trainer.ipc.stage_messages import DrawMicrobatch, DropStageSum, MicrobatchDrawn
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import StepStatement
from protocol.pipeline import owner_events
from protocol.pipeline.course import ExactPart
from protocol.pipeline.exact.ledger import StepLedger
from protocol.pipeline.exact.reports import read_step_reports
from protocol.pipeline.exact.server import ExactServer
from protocol.pipeline.exact.settlement import OfferStep, SayStatement, Settlement
from protocol.pipeline.exact.statements import Statement
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import HeldBlob, Key
from protocol.pipeline.owner import Owner
from protocol.pipeline.routing import StagePeer
from protocol.pipeline.stages import server_events
from protocol.pipeline.stages.settings import StageSettings

OWN = ""  # holder of the tokens of our own microbatches, beside their key at the server


class ExactPipeline(Pipeline):
    """The part of a replica that serves a stage and owns microbatches of exact steps of `settlement.count` of them.

    `sequences`: of a microbatch.
    """

    server: ExactServer | None

    def __init__(
        self, settings: StageSettings, owner: Owner, parts: PipelineParts, settlement: Settlement, sequences: int
    ) -> None:
        super().__init__(settings, owner, parts)
        self.settlement = settlement
        self._sequences = sequences
        self._step = 0
        self._offer: tuple[int, StepLedger] | None = None  # the ledger of our last contribution, and its round
        self._numbers: dict[int, int] = {}  # ids of our microbatches that are drawn or on their way, by serial

    def on_trainer_message(self, message: FromTrainer) -> None:
        """Take a message of the trainer."""
        match message:
            case Ready():
                self._step = message.exact_step
                for serial in self._drawing:
                    self._numbers.pop(serial, None)
            case AnchorApplied():
                self._step = message.exact_step
                if message.round <= self._round:  # of another chain: what was computed for ours counts no more
                    self._begin_life(Ledger(), Ledger())
            case ContributionHeader():
                ledger = StepLedger.from_bytes(bytes.fromhex(message.ledger), self.settlement.count)
                self._offer = message.round, ledger
                self._note_offer()
        super().on_trainer_message(message)
        self._settle()

    def take_statement(self, peer: PeerId, body: StepStatement) -> None:
        """Take what another server says about its sum. Raises MalformedError."""
        statement = Statement.from_wire(body, self.settlement.count)
        self.settlement.record(peer, statement, time.monotonic())
        self._settle()
        self._draw()

    def _build_server(self, round_number: int) -> ExactServer:
        self.settlement.begin(round_number, self._life, time.monotonic())
        return ExactServer(self.settings, self._life, round_number, self.settlement)

    def _set_round(self, number: int) -> None:
        self._numbers.clear()
        super()._set_round(number)
        self._send(self.owner.end_round(time.monotonic()))  # the ends make room for microbatches of the new round
        self._note_offer()

    def _note_offer(self) -> None:
        """Change our sum no more in a round for which our contribution is made; a restarted peer may reach it later."""
        if self._offer is not None and self._offer[0] == self.settlement.round:
            self.settlement.offered(self._offer[1], time.monotonic())

    def _update_peers(self) -> None:
        live = self._parts.node.directory.live()
        stages = stage_peers(live, self.settings.stages)
        lives = [{entry.peer: entry.life for entry in peers} for peers in stages]
        lives[self.settings.stage][self._me] = self._life
        owners = {entry.peer for peers in stages for entry in peers if self._owns(entry)} - {self._me}
        self.settlement.set_peers(lives, owners if self._is_resting else owners | {self._me})
        self.settlement.take_reports(read_step_reports(live.values(), self.settings.stages))
        super()._update_peers()

    def _owns(self, entry: StagePeer) -> bool:
        """Return whether a peer owns microbatches of the step; one that is far behind cannot. Records may be late."""
        return not entry.draining and entry.round >= self._round - 1

    def _feed(self, event: server_events.Event) -> None:
        super()._feed(event)
        self._settle()
        if isinstance(event, server_events.Tick):
            self._draw()

    def _settle(self) -> None:
        """Carry out what the settlement says now."""
        if self.server is None:
            return
        for action in self.settlement.advance(time.monotonic()):
            match action:
                case SayStatement(statement):
                    for peer in self.settlement.listeners:
                        self._parts.background.spawn(self._say(peer, statement))
                case OfferStep(doubles):
                    self._serve(self.server.offer(doubles))

    async def _say(self, peer: PeerId, statement: Statement) -> None:
        try:
            await self._parts.calls.state(peer, statement)
        except (UnreachableError, PeerFault):
            return  # it is repeated

    def _serve(self, actions: Iterable[server_events.Action]) -> None:
        for action in actions:
            if isinstance(action, server_events.DropSum):
                self._order(DropStageSum(round=self._round))
            else:
                super()._serve([action])

    def _send(self, actions: Iterable[owner_events.Action]) -> None:
        for action in actions:
            if isinstance(action, owner_events.Finished) and action.serial in self._numbers:
                number = self._numbers.pop(action.serial)
                self.settlement.acknowledge(number, action.added, time.monotonic())
                if action.reason is not None:
                    self.settlement.postpone(number, time.monotonic())
            super()._send([action])

    def _draw(self) -> None:
        """Let the trainer read those of our microbatches that a stage lacks, as many as may be on their way."""
        room = self.owner.room - len(self._drawing)
        if self.server is None or self._is_resting or room <= 0:
            return
        for number in self.settlement.wanted(set(self._numbers.values()), time.monotonic())[:room]:
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            self._numbers[serial] = number
            slot = self._drawing[serial] = self._parts.activations.take_slot("tokens")
            window = (self._step * self.settlement.count + number) * self._sequences
            self._order(DrawMicrobatch(serial=serial, slot=slot, window=window))

    def _on_drawn(self, message: MicrobatchDrawn) -> None:
        slot, number = self._drawing.pop(message.serial, None), self._numbers.get(message.serial)
        if slot is None:
            return  # of a trainer that died meanwhile
        if number is None or self.owner.room <= 0:
            self._numbers.pop(message.serial, None)
            self._parts.activations.give_back(slot)  # of a round that is over
            return
        blob = self._parts.activations.publish(Key(OWN, message.serial), slot)
        part = ExactPart(self._round, number, self.settlement.counted_at(number))
        self._send(self.owner.begin(message.serial, HeldBlob(blob, self._me), time.monotonic(), part))

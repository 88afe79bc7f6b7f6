"""Nodes of a pipeline with exact steps in virtual time: each owns microbatches, serves a stage, and contributes.

Rounds are those of a notary: a stage decides once all its live nodes have contributed, or after a grace, with what a
live node still holds. What each sum really contains is counted beside the machines, and checked at every step that is
applied.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from protocol.identity import PeerId
from protocol.pipeline import ledger as ledgers
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import OfferStep, SendStatement, Statement, StepAgreement, StepReports
from protocol.pipeline.ledger import Ledger, StepLedger
from protocol.pipeline.messages import HeldBlob, Key
from protocol.pipeline.microbatch import ExactPart, OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.server import StageServer
from protocol.pipeline.steps import ExactSteps
from tests.protocol.pipeline.virtual.scenario import (
    TOKENS,
    InvariantError,
    Peer,
    Scenario,
    blob_of,
    run_id,
    stage_settings,
)
from tests.protocol.pipeline.virtual.virtual_swarm import FORWARD_SHARE, VirtualSwarm

GRACE, TICK = 2.0, 0.1


@dataclass
class Sum:
    """What a trainer has really added, and the ledger that it keeps."""

    round: int
    ledger: StepLedger
    contents: Counter[int] = field(default_factory=Counter)


@dataclass
class Contribution:
    """A sum that was offered; `holders` have its bytes."""

    total: Sum
    holders: set[PeerId]


class Node:
    """A daemon with its trainer: an owner and a server, which live and die together."""

    def __init__(self, owner: Peer, server: Peer, agreement: StepAgreement) -> None:
        self.owner = owner
        self.server = server
        self.agreement = agreement
        self.total = Sum(0, StepLedger(agreement.count))
        self.round = 0
        self.numbers: dict[int, int] = {}

    @property
    def name(self) -> PeerId:
        return self.server.name

    @property
    def stage(self) -> int:
        assert self.server.stage is not None
        return self.server.stage


class ExactSwarm(VirtualSwarm):
    """All nodes, the network, the clock, and the rounds of all stages."""

    def __init__(self, scenario: Scenario, seed: int, count: int) -> None:
        self.count = count
        self.nodes: dict[PeerId, Node] = {}
        self.steps = 0
        self.void_rounds = 0
        self.round_ended = 0.0  # when the newest round did
        self._offered: dict[tuple[int, int], dict[PeerId, Contribution]] = {}  # by stage and round
        self._decided: dict[int, dict[int, bool]] = {}
        self._applied: dict[tuple[int, int], bool] = {}
        self._serial = 0
        self._gone: set[PeerId] = set()
        super().__init__(replace(scenario, step_size=count), seed)

    # Nodes

    def _build(self) -> None:
        for stage, speeds in enumerate(self.scenario.speeds):
            for index, speed in enumerate(speeds):
                server, owner = Peer(f"server-{stage}-{index}", stage, speed), Peer(f"owner-{stage}-{index}", None, 0.0)
                runs = [run_id(number) for number in range(len(self.scenario.speeds))]
                node = Node(owner, server, StepAgreement(server.name, runs, stage, self.count))
                self.peers |= {server.name: server, owner.name: owner}
                self.nodes[server.name] = self.nodes[owner.name] = node
        self._every_node = [node for name, node in self.nodes.items() if name == node.name]
        for node in self.every_node():
            self.start_node(node)
        self.publish()
        self._tick_all()

    def every_node(self) -> list[Node]:
        return self._every_node

    def start_node(self, node: Node) -> None:
        runs = [run_id(number) for number in range(len(self.scenario.speeds))]
        node.round = max([0, *(number + 1 for stage, number in self._applied if stage == node.stage)])
        node.agreement = StepAgreement(node.name, runs, node.stage, self.count)
        node.agreement.begin(node.round, node.server.life, self.now)
        node.total, node.numbers = Sum(node.round, StepLedger(self.count)), {}
        self._restore_contribution(node)
        settings = OwnerSettings(node.owner.name, self.scenario.in_flight, round_pause=TICK)
        node.owner.owner = Owner(settings, runs, random.Random(self.chance.random()))
        node.server.server = StageServer(
            ExactSteps(stage_settings(self.scenario, node.stage), node.agreement), node.server.life, node.round
        )

    def _restore_contribution(self, node: Node) -> None:
        """Repeat a contribution that is on disk; before the first checkpoint nothing is, so another one is made."""
        place = node.stage, node.round
        contribution = self._offered.get(place, {}).get(node.name) if node.round else None
        if contribution is not None and not self._is_decided(place):
            node.agreement.offered(contribution.total.ledger, self.now)
            self._spread(place, node, contribution)

    def kill_node(self, node: Node) -> None:
        for peer in (node.owner, node.server):
            self.kill(peer)

    def remove_node(self, node: Node) -> None:
        """Kill a node for good, if its stage has another one now."""
        if any(mate is not node for mate in self._mates(node.stage)):
            self.kill_node(node)
            self._gone.add(node.name)

    def revive_node(self, node: Node) -> None:
        if node.server.is_alive or node.name in self._gone:
            return
        for peer in (node.owner, node.server):
            peer.is_alive, peer.life = True, peer.life + 1
        node.owner.first_serial = self._serial + 1
        self.start_node(node)
        self.publish()

    def kill_trainer(self, peer: Peer) -> None:
        node = self.nodes[peer.name]
        if not peer.is_alive:
            return
        peer.life += 1
        node.total = Sum(node.round, StepLedger(self.count))
        self.serve(peer, server_events.TrainerRestarted(peer.life, Ledger()))
        self.publish()

    def _learn(self, peer: Peer) -> None:
        node = self.nodes[peer.name]
        if not peer.is_alive or peer is node.owner:
            return
        stages = self.listing(node.name)
        lives = [{entry.peer: entry.life for entry in entries} for entries in stages]
        seen = [each for each in self.every_node() if self.is_seen(node.name, each.server)]
        current = [each for each in seen if each.round >= node.round - 1]
        node.agreement.set_peers(lives, [each.name for each in current])
        self.own(node.owner, owner_events.PeersChanged(stages, node.round))
        owners = [each.owner for each in seen]
        self.serve(peer, server_events.OwnersChanged({each.name: each.first_serial for each in owners}))
        self._hear_decision(node, node.round)

    def _set_timer(self, peer: Peer, machine: object) -> None:
        """Tick all machines at the same times instead."""

    def _tick_all(self) -> None:
        for node in self.every_node():
            if node.server.is_alive:
                self._tick_node(node)
        self.schedule(TICK, self._tick_all)

    def _tick_node(self, node: Node) -> None:
        """Let a node look at the clock; a machine with nothing due would change nothing."""
        if self._is_due(node.owner.owner):
            self.own(node.owner, None)
        else:
            self.fill(node.owner)
        if self._is_due(node.server.server):
            self.serve(node.server, None)
        else:
            self.settle(node)

    def _is_due(self, machine: Owner | StageServer | None) -> bool:
        deadline = machine.next_deadline() if machine is not None else None
        return deadline is not None and deadline <= self.now

    # The owner

    def fill(self, peer: Peer) -> None:
        node, owner = self.nodes[peer.name], peer.owner
        if owner is None or owner.room <= 0:
            return
        for number in node.agreement.wanted(set(node.numbers.values()), self.now)[: owner.room]:
            self._serial += 1
            key = Key(peer.name, self._serial)
            node.numbers[key.serial] = number
            self.begun[key] = "open"
            tokens = blob_of(key, "tokens", TOKENS)
            self._names[tokens.digest] = "tokens"
            peer.blobs[key] = {tokens}
            part = ExactPart(node.agreement.round, number, node.agreement.counted_at(number))
            self._carry_out(peer, owner.begin(key.serial, HeldBlob(tokens, peer.name), self.now, part))

    def _carry_out(self, peer: Peer, actions: Iterable[owner_events.Action]) -> None:
        node, listed = self.nodes[peer.name], list(actions)
        for action in listed:
            if isinstance(action, owner_events.Finished) and action.serial in node.numbers:
                number = node.numbers.pop(action.serial)
                node.agreement.acknowledge(number, action.added, self.now)
                if action.reason is not None:
                    node.agreement.postpone(number, self.now)
        super()._carry_out(peer, listed)

    # The server

    def serve(self, peer: Peer, event: server_events.Event | None) -> None:
        super().serve(peer, event)
        self.settle(self.nodes[peer.name])

    def settle(self, node: Node) -> None:
        server = node.server.server
        if server is None or not isinstance(server.steps, ExactSteps):
            return
        for action in node.agreement.advance(self.now):
            match action:
                case SendStatement(_, statement):
                    for other in self.every_node():
                        if other is not node and not self.is_lost(node.name, other.name):
                            self.schedule(self.latency(), lambda o=other, s=statement: self._hear(o, node.name, s))  # type: ignore[misc]
                case OfferStep(doubles):
                    server.steps.offer(doubles, self.now)
                    self._work(node.server, server.advance(self.now))

    def _hear(self, node: Node, sender: PeerId, statement: Statement) -> None:
        if node.server.is_alive:
            node.agreement.record(sender, statement, self.now)
            self.settle(node)
            self.fill(node.owner)

    def _work(self, peer: Peer, actions: Iterable[server_events.Action]) -> None:
        for action in actions:
            if isinstance(action, server_events.DropSum):
                total = self.nodes[peer.name].total
                total.ledger, total.contents = StepLedger(self.count), Counter()
            else:
                super()._work(peer, [action])

    def _compute(self, peer: Peer, action: server_events.Compute) -> None:
        node, task, server, total = self.nodes[peer.name], action.task, peer.server, self.nodes[peer.name].total
        share = FORWARD_SHARE if task.direction == "forward" else 1 - FORWARD_SHARE
        life = server.life if server is not None else 0
        self.check_inputs(peer, task)

        def end() -> None:
            if peer.server is not server or (node.total is not total and node.total.round == total.round):
                return  # the daemon or the trainer has died meanwhile
            if server is None or server.life != life:
                return  # the same, and the round is another one
            self.check_inputs(peer, task)
            valid = not peer.is_broken and node.total.round == task.round
            if valid and task.number is not None and (action.adds or action.takes_away):
                self._change(node.total, task.number, action.adds)
            result = self._result(peer, task.key, task.direction) if valid else None
            if result is not None:
                peer.blobs.setdefault(task.key, set()).add(result)
            loss = 1.0 if valid and peer.stage == len(self.scenario.speeds) - 1 else None
            milliseconds = 1000 * share / peer.speed
            self.serve(
                peer,
                server_events.Computed(task.key, task.direction, action.token, valid, result, loss, milliseconds),
            )

        self.schedule(share / peer.speed, end)

    def _change(self, total: Sum, number: int, adds: bool) -> None:
        changed = StepLedger.of(self.count, (number,))
        total.contents[number] += 1 if adds else -1
        total.ledger = total.ledger | changed if adds else total.ledger - changed

    def _step(self, peer: Peer, action: server_events.TakeStep) -> None:
        node, server, total = self.nodes[peer.name], peer.server, self.nodes[peer.name].total

        def end() -> None:
            if peer.server is not server or (node.total is not total and node.total.round == total.round):
                return  # the daemon or the trainer has died meanwhile
            if node.total is total and node.agreement.round == total.round:
                node.agreement.offered(total.ledger, self.now)
                self._offer(node, total)
            self.serve(peer, server_events.Stepped())

        self.schedule(0.01, end)

    # Rounds

    def _offer(self, node: Node, total: Sum) -> None:
        """Contribute to the round of a sum."""
        place = node.stage, total.round
        copy = Sum(total.round, total.ledger, Counter(total.contents))
        self._spread(place, node, Contribution(copy, {node.name}))

    def _spread(self, place: tuple[int, int], node: Node, contribution: Contribution) -> None:
        """Let the others of the stage fetch a contribution, and decide the round once all have offered."""
        if self._is_decided(place):
            return
        offered = self._offered.setdefault(place, {})
        if not offered:
            self.schedule(GRACE, lambda: self._decide(place))
        offered[node.name] = contribution
        contribution.holders.add(node.name)
        for mate in self._mates(node.stage):
            if self.is_linked(node.name, mate.name):
                self.schedule(4 * self.latency(), lambda m=mate: self._fetch_contribution(node, m, contribution))  # type: ignore[misc]
        self.schedule(8 * self.scenario.delay, lambda: self._decide_if_all_offered(place))

    def _fetch_contribution(self, node: Node, mate: Node, contribution: Contribution) -> None:
        if node.server.is_alive and mate.server.is_alive:
            contribution.holders.add(mate.name)

    def _is_decided(self, place: tuple[int, int]) -> bool:
        return place[0] in self._decided.get(place[1], {})

    def _mates(self, stage: int) -> list[Node]:
        return [node for node in self.every_node() if node.stage == stage and node.server.is_alive]

    def _decide_if_all_offered(self, place: tuple[int, int]) -> None:
        if self._offered[place].keys() >= {node.name for node in self._mates(place[0]) if node.round == place[1]}:
            self._decide(place)

    def _decide(self, place: tuple[int, int]) -> None:
        stage, number = place
        alive = {node.name for node in self._mates(stage)}
        left = [each for each in self._offered[place].values() if each.holders & alive]
        if self._is_decided(place):
            return
        if not left:
            self._offered[place].clear()  # all contributions died with their owners
            return
        decided = self._decided.setdefault(number, {})
        decided[stage] = ledgers.covers_step([each.total.ledger.to_bytes() for each in left], self.count)
        self._offered[place] = {name: each for name, each in self._offered[place].items() if each in left}
        for node in self.every_node():
            self.schedule(5 * self.latency(), lambda n=node: self._hear_decision(n, number))  # type: ignore[misc]

    def _hear_decision(self, node: Node, number: int) -> None:
        if not node.server.is_alive or node.round != number:
            return
        reports = StepReports(len(self.scenario.speeds), self._decided)
        node.agreement.take_reports(reports)
        self.settle(node)
        own = self._decided.get(number, {}).get(node.stage)
        verdict = reports.verdict(number, {}) if own is not None else None
        if verdict is not None:
            self._apply(node, number, verdict)

    def _apply(self, node: Node, number: int, counts: bool) -> None:
        """Let the trainer take over the weights after a round, and a moment later its daemon know."""
        if (node.stage, number) not in self._applied:
            self._applied[node.stage, number] = counts
            self.round_ended = self.now
            self._check_step(node.stage, number, counts)
        node.round = number + 1
        node.total = Sum(number + 1, StepLedger(self.count))
        server = node.server.server
        self.schedule(self.chance.uniform(0, 0.05), lambda: self._change_round(node, server, number + 1))

    def _change_round(self, node: Node, server: object, number: int) -> None:
        if node.server.server is not server or node.owner.owner is None:
            return
        node.numbers.clear()
        self._carry_out(node.owner, node.owner.owner.end_round(self.now))
        self.serve(node.server, server_events.RoundChanged(number))
        self._learn(node.server)
        self._hear_decision(node, number)

    def _check_step(self, stage: int, number: int, counts: bool) -> None:
        verdicts = {self._applied[place] for place in self._applied if place[1] == number}
        if len(verdicts) > 1:
            raise InvariantError(f"stages are apart: round {number} counts at some of them only")
        if not counts:
            self.void_rounds += stage == 0
            return
        self.steps += stage == 0
        total = Counter[int]()
        for contribution in self._offered[stage, number].values():
            total.update(contribution.total.contents)
        wrong = [each for each in range(self.count) if total[each] != 1]
        if wrong:
            raise InvariantError(f"the step of round {number} counts {wrong} otherwise than once at stage {stage}")

"""Show the peer directory to a replica: the trainers, their heads, and the peers to ask."""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stages.stage_peers import MissingPeers, lowest_round
from node.daemon.stages.stage_record import StageRecord
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.monitoring.status import StatusSource
from protocol.blobs.blob import DIGEST_BYTES
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft
from protocol.membership.record_fields import parse_kept_states, record_of_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.exact import StepReports
from protocol.pipeline.ledger import StepLedger
from protocol.recent import RecentTable
from protocol.signing import MAX_ROUND
from protocol.transport.nat import is_relay_only, relays_of

MAX_LEFT_PEERS = 4096
MAX_LEFT_LOSSES = 64  # records of peers that left, for the losses that they measured


class SwarmView:
    """The node's directory as one replica sees it: everything that a replica asks about peers passes here.

    A replica of a stage of a pipeline sees the trainers of its stage alone, and shows its own state in `stage`.
    `has_contacts`: whether somebody was named whom we can ask for the run.
    """

    def __init__(
        self,
        admitted: AdmittedPeers,
        status: StatusSource,
        has_contacts: bool,
        rng: random.Random,
        stage: StageRecord | None = None,
    ) -> None:
        self._stage_record = stage
        self._stage = stage.stage if stage is not None else None
        self._missing = MissingPeers(stage.timing) if stage is not None else None
        self._decisions = stage.decisions if stage is not None else None
        self._admitted_peers = admitted
        self._directory = admitted.directory
        self._status = status
        self.has_contacts = has_contacts
        self._rng = rng
        self._left_peers = RecentTable[PeerId, PeerState](MAX_LEFT_PEERS)
        self._ended_peers = RecentTable[PeerId, None](MAX_LEFT_PEERS)
        self._left_losses = RecentTable[PeerId, PeerRecord](MAX_LEFT_LOSSES)
        self._has_met_trainer = False  # whether another trainer was ever seen
        self._directory.subscribe(self)

    def _live(self) -> Mapping[PeerId, PeerRecord]:
        """Return the records of all live peers, without the trainers of other stages."""
        return self._seen_in(self._directory.live().items())

    def _admitted_here(self) -> Mapping[PeerId, PeerRecord]:
        """Return the same without trainers that the run does not admit."""
        return self._seen_in(self._admitted_peers.records().items())

    def _seen_in(self, records: Iterable[tuple[PeerId, PeerRecord]]) -> dict[PeerId, PeerRecord]:
        seen = ((peer, self._seen(record)) for peer, record in records)
        return {peer: record for peer, record in seen if record is not None}

    def _seen(self, record: PeerRecord) -> PeerRecord | None:
        """Return a record as our stage sees it; None for a trainer of other stages."""
        if self._stage is None or record.role != "trainer":
            return record
        return record_of_stage(record, self._stage)

    def other_records(self) -> dict[PeerId, PeerRecord]:
        """Return the records of all other live peers, in random order to spread requests."""
        others = [(peer, record) for peer, record in self._live().items() if peer != self._directory.peer_id]
        self._rng.shuffle(others)
        return dict(others)

    def trainers(self) -> list[PeerId]:
        """Return all live trainers at any round, including this node."""
        return [peer for peer, record in self._admitted_here().items() if record.role == "trainer"]

    def rollout_peers(self) -> list[PeerId]:
        """Return the live peers that draw rollouts and that the run admits, in random order to spread requests."""
        live = self._directory.live()
        found = [peer for peer, record in live.items() if record.role == "rollout"]
        self._rng.shuffle(found)
        return [peer for peer in found if self._admitted_peers.admits(peer, live[peer])]

    def other_trainers(self) -> list[PeerId]:
        return [peer for peer in self.trainers() if peer != self._directory.peer_id]

    def live_peers(self, chosen: Sequence[PeerId]) -> list[PeerId]:
        """Return those of the chosen peers that are live, whether they train or not."""
        live = self._directory.live()  # a peer of another stage may keep a state of ours
        return [peer for peer in chosen if peer in live]

    def unreachable_peers(self) -> frozenset[PeerId]:
        """Return the peers hidden behind NAT if we are too: only small messages reach them.

        Empty if no peer could relay.
        """
        live = self._live()
        own = live.get(self._directory.peer_id)
        if own is None or not is_relay_only(own.addresses):
            return frozenset()
        hidden = frozenset(peer for peer, record in live.items() if is_relay_only(record.addresses))
        return hidden if self._reachable_trainers(self._admitted_here()) else frozenset()

    def relay_candidates(self, owner: PeerId) -> list[PeerId]:
        """Return the peers that may relay from a hidden peer, those first that it uses as circuit relays."""
        live = self._live()
        relays = relays_of(live[owner].addresses) if owner in live else ()
        reachable = self._reachable_trainers(self._admitted_here())
        return sorted(reachable, key=lambda peer: (peer not in relays, hash((owner, peer))))

    def _reachable_trainers(self, live: Mapping[PeerId, PeerRecord]) -> list[PeerId]:
        """Return the trainers that other peers can call."""
        trainers = ((peer, record.addresses) for peer, record in live.items() if record.role == "trainer")
        return [peer for peer, addresses in trainers if addresses and not is_relay_only(addresses)]

    def is_isolated(self) -> bool:
        """Return whether no other trainer is live, although we met one or the user named a contact."""
        return not self.other_trainers() and (self._has_met_trainer or self.has_contacts)

    def is_trainer(self, peer: PeerId) -> bool:
        record = self._admitted_here().get(peer)
        return record is not None and record.role == "trainer"

    def snapshot(self) -> SwarmSnapshot:
        """Return the state of all live peers, in random order to spread requests."""
        live = list(self._directory.live().items())
        self._rng.shuffle(live)
        states, left = self._admitted(peer_states(self._seen_in(live))), dict(self._left_peers)
        for peer in self._admitted_peers.contradicted:  # so that they lose their votes at once
            states.pop(peer, None)
            left[peer] = PeerState(None)
        ended = frozenset(self._ended_peers)
        if self._stage is None or self._missing is None:
            return SwarmSnapshot(states, left, ended=ended)
        states |= kept_states_of(dict(live), self._stage)
        records = list(self._admitted_peers.standing_records().values())
        trainers = sum(record.role == "trainer" for record in records)
        missed = self._missing.missed_by_most(trainers, time.monotonic())
        steps = self._decisions.reports() if self._decisions is not None else StepReports(0)
        return SwarmSnapshot(states, left, lowest_round(records, self._stage), missed, ended, steps)

    def stage_witnesses(self) -> list[PeerId]:
        """Return peers that know the chain of our stage: its trainers, or its keepers if there is none; random order.

        A contact of the user usually serves another stage. Of a run that is not cut, nobody but contacts is asked.
        Those that the run admits go first; a host needs no ticket.
        """
        if self._stage is None:
            return []
        live, admits = self._directory.live(), self._admitted_peers.admits
        found = stage_witnesses(self.snapshot().peers, self._directory.peer_id)
        return [peer for peer in found if admits(peer, live[peer])] or found

    def _admitted(self, states: dict[PeerId, PeerState]) -> dict[PeerId, PeerState]:
        """Return the states with those that the run does not admit as observers."""
        admitted = self._admitted_peers.records()
        refused = {
            peer: replace(state, is_trainer=False)
            for peer, state in states.items()
            if state.is_trainer and peer not in admitted
        }
        return states | refused

    def is_our_turn_to_evaluate(self, round_number: int) -> bool:
        """Return whether it is our turn to evaluate the anchor of a round; trainers that are not paused take turns.

        A stage alone has no loss.
        """
        if self._stage is not None:
            return False
        live = self._live()
        trainers = sorted(peer for peer in self.trainers() if not live[peer].resting)
        return bool(trainers) and trainers[round_number % len(trainers)] == self._directory.peer_id

    def newest_validation(self, round_number: int) -> PeerRecord | None:
        """Return the record with the newest validation loss up to a round, also of a peer that left; None without."""
        return find_newest_validation([*self._left_losses.values(), *self._admitted_here().values()], round_number)

    def publish_loss(self) -> None:
        """Let the other peers know at once of the validation loss that we have measured."""
        self._directory.publish(urgent=True, **self._status.status().record_fields())

    def announce_head(self, chain: Chain, state: Digest, urgent: bool = True) -> None:
        """Announce our head, and let the voters of its next round go before strangers.

        A head is not urgent if it follows from a commit that includes our contribution.
        """
        head = chain.head
        self._directory.set_voters(self._with_standing(chain.electorate.voters))
        self._admitted_peers.learn(self._stage, chain.electorate)
        (self._stage_record or self._directory).publish(
            urgent=urgent, round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state,
            **self._status.status().record_fields(),
        )  # fmt: skip

    def announce_step(self, round_number: int, is_complete: bool, lacking: StepLedger) -> None:
        """Announce how our stage has decided an exact step."""
        if self._stage is not None and self._decisions is not None:
            self._decisions.note(self._stage, round_number, is_complete, lacking)
        self._directory.publish(urgent=True, step_decided=1 + 2 * round_number + is_complete)

    def _with_standing(self, voters: frozenset[PeerId]) -> frozenset[PeerId]:
        """Return the voters of our stage, and the trainers of the others, whose voters we do not know."""
        if self._stage is None or not voters:
            return voters
        records = self._admitted_peers.standing_records()
        return voters | {peer for peer, record in records.items() if self._seen(record) is None}

    def publish_progress(self) -> None:
        """Update the progress fields of our peer record; each new head and each renewal publishes them."""
        (self._stage_record or self._directory).update(**self._status.status().record_fields())

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        if self._missing is not None:
            self._missing.observe([event for event in events if self._may_be_missed(event)], time.monotonic())
        for event in events:
            self._observe(event)

    def _may_be_missed(self, event: MembershipEvent) -> bool:
        """Return whether the run may wait for a peer: free keys come and go."""
        if not isinstance(event, PeerLeft) or event.record is None:
            return True
        return self._admitted_peers.had_standing(event.peer, event.record)

    def _observe(self, event: MembershipEvent) -> None:
        record = event.record or PeerRecord(role="trainer")
        seen = record if event.record is None else self._seen(record)
        if seen is None:
            return
        if isinstance(event, PeerJoined):
            self._left_peers.pop(event.peer, None)
            self._ended_peers.pop(event.peer, None)
            self._has_met_trainer = self._has_met_trainer or record.role == "trainer"
        elif isinstance(event, PeerLeft) and event.reason == "ended":
            self._ended_peers[event.peer] = None
        elif isinstance(event, PeerLeft) and event.reason == "left":
            self._left_peers[event.peer] = peer_state(seen)
            if record.validation_round and self._admitted_peers.admits(event.peer, record):
                self._left_losses[event.peer] = record


def peer_states(records: Mapping[PeerId, PeerRecord]) -> dict[PeerId, PeerState]:
    """Return the states that verified peer records announce, in their order."""
    return {peer: peer_state(record) for peer, record in records.items()}


def states_at(records: Mapping[PeerId, PeerRecord], stage: int | None) -> dict[PeerId, PeerState]:
    """Return the states of the whole run (None) or of a stage, that its trainers and its keepers announce."""
    if stage is None:
        return peer_states(records)
    served = ((peer, record_of_stage(record, stage)) for peer, record in records.items())
    trained = {peer: record for peer, record in served if record is not None}
    return peer_states(trained) | kept_states_of(records, stage)


def stage_witnesses(states: Mapping[PeerId, PeerState], me: PeerId) -> list[PeerId]:
    """Return the other trainers of a stage that have made a round; if there is none, its keepers."""
    known = [peer for peer, state in states.items() if peer != me and state.head is not None and state.head.round]
    return [peer for peer in known if states[peer].is_trainer] or known


def kept_states_of(records: Mapping[PeerId, PeerRecord], stage: int) -> dict[PeerId, PeerState]:
    """Return the states of a stage that other peers keep, which do not train it."""
    found = {}
    for peer, record in records.items():
        if record_of_stage(record, stage) is not None:
            continue
        for kept in parse_kept_states(record.kept) if record.kept else ():
            if kept.stage == stage:
                head = ChainHead(kept.round, kept.digest, kept.tokens)
                found[peer] = PeerState(head, kept.state, is_trainer=False, revision=record.revision)
    return found


def find_newest_validation(records: Iterable[PeerRecord], round_number: int = MAX_ROUND) -> PeerRecord | None:
    """Return the record with the newest validation loss up to a round, of a trainer rather than a host; or None."""
    measured = [record for record in records if 0 < record.validation_round <= round_number]
    return max(measured, key=lambda record: (record.validation_round, record.role == "trainer"), default=None)


def peer_state(record: PeerRecord) -> PeerState:
    """Return the state that a verified peer record announces."""
    has_head = len(record.digest) == DIGEST_BYTES
    return PeerState(
        ChainHead(record.round, record.digest, record.chain_tokens) if has_head else None,
        record.state_digest,
        is_trainer=record.role == "trainer",
        is_resting=record.resting,
        revision=record.revision,
        validation_round=record.validation_round,
    )

"""Decide when a peer whose run has reached its target may leave. PURE.

It stays for trainers that are about to reach the target, and longer for those that come back meanwhile, because they
need its blobs, and one that finds nobody would make the last rounds again alone; for the validation loss of
the final model, which one of them measures; for hosts that fetch the final state; and until `target.keepers` other
machines hold that state, because nobody could get the model otherwise.
A machine holds the state once its record names it, also if it has left since. Every wait has an end: the last peer of
a run that nobody comes back to leaves after a day, with the model on its disk.
"""

from collections.abc import Mapping, Sequence

from node.loop.actions import LeaveRun, ReportPhase
from node.loop.options import LoopOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId

RETURN_SECONDS = 10.0  # for a peer that is back to hear whether the organiser has extended the run
ARRIVAL_SECONDS = 20.0  # for trainers that are about to reach the target
MEASURING_SECONDS = 30.0  # for the peer whose turn it is to measure the loss of the final model
KEEPING_SECONDS = 24 * 3600.0  # for a machine to come that takes the state
# for a host, or a trainer that comes back, to fetch the state; plus its size / MIN_HANDOVER_BYTES_PER_SECOND
MIN_HANDOVER_SECONDS = 60.0
MIN_HANDOVER_BYTES_PER_SECOND = 500_000
MAX_WAITED = 1024  # hosts, and as many trainers


class Departure:
    """The end of one peer's part in a run. It begins when the peer has the final state."""

    def __init__(self, options: LoopOptions) -> None:
        self._peer_id = options.round.peer_id
        self._options = options
        self._snapshot = SwarmSnapshot({})
        self._has_met_others = False
        self._head: ChainHead | None = None  # the final one, from `begin` until we leave
        self._state: Digest = b""
        self._since = 0.0
        self._patience = 0.0
        self._hears_until = 0.0
        self._measured_until = 0.0
        self._holders: set[PeerId] = set()  # other machines with the final state; counted up to `keepers`
        self._hosts_since: dict[PeerId, float] = {}  # hosts that lack the final state, and since when we know them
        self._late_since: dict[PeerId, float] = {}  # trainers that lack the final head, and since when we know them
        self._deadline: float | None = None
        self._reported: str | None = None

    def set_snapshot(self, snapshot: SwarmSnapshot) -> None:
        self._snapshot = snapshot
        self._has_met_others = self._has_met_others or bool({*snapshot.peers, *snapshot.left} - {self._peer_id})

    def begin(self, head: ChainHead, state: Digest, has_restarted: bool, now: float) -> None:
        """Begin to leave with this final state.

        A restarted peer that finds nobody leaves soon: it waited when it reached the target. A peer that trains alone
        by design does not wait for others at all.
        """
        options = self._options
        is_alone = options.min_peers == 1 and not options.has_contacts and not self._has_met_others
        self._patience = 0.0 if is_alone else options.expiry if has_restarted else KEEPING_SECONDS
        self._head, self._state, self._since = head, state, now
        self._late_since = _known_since({}, self._late_trainers(head), now)
        is_steered = bool(options.steering.base.run.organiser_key)
        self._measured_until = now if has_restarted else now + MEASURING_SECONDS
        self._hears_until = now + RETURN_SECONDS if has_restarted and is_steered and not is_alone else now

    def advance(self, now: float) -> list[ReportPhase | LeaveRun]:
        """Return LeaveRun once, when nobody needs this peer or the run goes on; before that, report why it stays."""
        if self._head is None:
            return []
        if not self._options.steering.is_target_reached:
            self._head = self._deadline = None
            return [ReportPhase("done", "the organiser has extended the run"), LeaveRun(is_extended=True)]
        self._observe(self._head, now)
        reason = self._reason_to_stay(self._head, now)
        if reason is None and self._options.stays:
            reason = "until this host is stopped"
        if reason is None:
            self._head = self._deadline = None
            return [ReportPhase("done", "the target is reached"), LeaveRun()]
        if reason == self._reported:
            return []
        self._reported = reason
        return [ReportPhase("done", f"the target is reached; waiting {reason}")]

    @property
    def _keepers(self) -> int:
        """Return how many other machines must hold the final state."""
        return self._options.steering.manifest_at(self._head.round if self._head else 0).target.keepers

    def next_deadline(self) -> float | None:
        """Return when the present wait ends."""
        return self._deadline

    def _reason_to_stay(self, head: ChainHead, now: float) -> str | None:
        options, late = self._options, len(self._late_since)
        if late and self._is_before(self._arrival_deadline(), now):
            return f"for {late} other {'peer' if late == 1 else 'peers'}"
        if self._awaits_loss(head) and self._is_before(self._measured_until, now):
            return "for the validation loss of the final model"
        if self._is_before(self._hears_until, now):
            return "to hear whether the organiser has extended the run"
        if not options.steering.knows_all(self._snapshot) and self._is_before(self._since + ARRIVAL_SECONDS, now):
            return "for the organiser's newest revision"
        missing = self._keepers - len(self._holders)
        if self._hosts_since and self._keepers:
            newest = max(self._hosts_since.values()) if missing > 0 else self._since
            if self._is_before(newest + self._handover_seconds, now):
                return "until the host holds the final model"
        if missing > 0 and self._is_before(self._since + self._patience, now):
            return f"until {missing} other {'machine holds' if missing == 1 else 'machines hold'} the final model"
        return None

    @property
    def _handover_seconds(self) -> float:
        return MIN_HANDOVER_SECONDS + self._options.state_bytes / MIN_HANDOVER_BYTES_PER_SECOND

    def _arrival_deadline(self) -> float:
        """Return how long this peer waits for late trainers; new keys do not prolong it again and again."""
        first_wait, newest = self._since + ARRIVAL_SECONDS, max(self._late_since.values())
        return first_wait if newest == self._since else min(newest, first_wait) + self._handover_seconds

    def _awaits_loss(self, head: ChainHead) -> bool:
        """Return whether losses of earlier models were measured, but none of the final one is known."""
        known = {**self._snapshot.left, **self._snapshot.peers}.values()
        measured = {state.validation_round for state in known} - {0}
        return bool(measured) and head.round not in measured

    def _is_before(self, deadline: float, now: float) -> bool:
        self._deadline = deadline if now < deadline else None
        return now < deadline

    def _observe(self, head: ChainHead, now: float) -> None:
        others = {peer: state for peer, state in self._snapshot.peers.items() if peer != self._peer_id}
        for peer, state in (*others.items(), *self._snapshot.left.items()):
            if len(self._holders) < self._keepers and self._has_final_state(state, head):
                self._holders.add(peer)
        hosts = [peer for peer, state in others.items() if state.is_keeper and not self._has_final_state(state, head)]
        self._hosts_since = _known_since(self._hosts_since, hosts, now)
        self._late_since = _known_since(self._late_since, self._late_trainers(head), now)

    def _has_final_state(self, state: PeerState, head: ChainHead) -> bool:
        if state.head is None or state.head.digest != head.digest or not state.state:
            return False
        return state.state == self._state or not self._options.compares_states

    def _late_trainers(self, head: ChainHead) -> list[PeerId]:
        heads = {peer: self._snapshot.peers[peer].head for peer in self._snapshot.trainers - {self._peer_id}}
        return [peer for peer, other in heads.items() if other is None or other.round < head.round]


def _known_since(before: Mapping[PeerId, float], peers: Sequence[PeerId], now: float) -> dict[PeerId, float]:
    """Return since when peers are waited for: now, unless they were before."""
    return {peer: before.get(peer, now) for peer in peers[:MAX_WAITED]}

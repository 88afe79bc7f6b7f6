"""All peers of a virtual network, what may befall them, and what must hold whatever befalls them."""

from collections.abc import Callable, Mapping, Set

from node.loop.actions import ApplyCommit, FetchBlob, LoopAction
from protocol.blobs.blob import Blob
from protocol.consensus.chain import genesis_head
from protocol.consensus.events import Send
from protocol.consensus.messages.contributions import (
    AppliedContributions,
    Commit,
    PartBlob,
    enumerate_parts,
    part_blobs_of,
)
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Election
from protocol.consensus.topology import Groups
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.simulation.liars import DoubleDecisions
from tests.simulation.table_sizes import count_entries, max_entries
from tests.simulation.virtual.network import NAMES, RUN_ID, Network, Scenario, fake_reduce
from tests.simulation.virtual.organiser import Organiser
from tests.simulation.virtual.peers import SimulatedPeer
from tests.simulation.work_accounting import WorkLedger

NO_LIARS: Mapping[PeerId, type[SimulatedPeer]] = {}
MAX_PEERS = 8


def leaders_by_rank(base: Digest) -> list[PeerId]:
    """Return all keys in the order in which they would lead the first view of a round."""
    return sorted(NAMES, key=lambda name: Election(base).ballot(0, name), reverse=True)


class SimulatedSwarm:
    """`decisions`: by round and base, the contents that were decided, and who voted for them or knows of it.

    `forks_allowed`: two may be. Otherwise only where the first has died with all of these, or where liars hold too many
    votes (see `DoubleDecisions`).
    """

    def __init__(
        self, scenario: Scenario, seed: int, forks_allowed: bool = False,
        liars: Mapping[PeerId, type[SimulatedPeer]] = NO_LIARS,
    ) -> None:  # fmt: skip
        self.scenario = scenario
        self.forks_allowed = forks_allowed
        self.liars = liars.keys()
        self.invented_heads: set[Digest] = set()  # of chains that liars made up
        self.lies_told: list[PeerId] = []  # by whom, as often as a liar did what an honest peer does not
        self.network = Network(scenario, seed)
        self.ledger = WorkLedger(genesis_head(RUN_ID))
        self.rejections: list[tuple[PeerId, PeerId | None, str]] = []
        self.unresolved = 0  # briefs that their receivers could not restore
        self.decisions: dict[tuple[int, Digest], dict[bytes, set[PeerId]]] = {}
        self.double_decisions = DoubleDecisions(self.liars)
        self.action_watchers: list[Callable[[PeerId, LoopAction], None]] = []
        if scenario.exchange == "groups":
            self.action_watchers.append(self._watch_groups)
        self.returning: set[PeerId] = set()  # dead, but not for good
        self.conflicting_peer: PeerId | None = None  # offers what others do, one byte shorter
        self.invented_blobs: set[Blob] = set()  # by it: there are none of that digest and size
        self._electorates: dict[Digest, Digest] = {}  # by the head that they follow
        self.peaks: dict[int, int] = {}  # by round, the most entries in the tables of any peer
        self.organiser = Organiser(self)
        self.strangers = frozenset(NAMES[MAX_PEERS : MAX_PEERS + scenario.strangers])
        self._foreseen_leaders = leaders_by_rank(genesis_head(RUN_ID).digest)
        self._rosters: dict[Digest, set[tuple[PeerId, ...]]] = {}  # by the base that they continue
        names = NAMES[: scenario.peers]
        self.peers = {name: liars.get(name, SimulatedPeer)(name, self.network, self) for name in names}
        self._unfinished = self.peers.keys() - self.liars

    def start(self) -> None:
        head = next(iter(self.peers.values())).chain.head
        for peer in self.peers.values():
            peer.gossip.records = {other: (head, 0.0) for other in self.peers if other != peer.name}
        for peer in self.peers.values():
            peer.start()

    def alive(self) -> list[SimulatedPeer]:
        """Return the honest peers that live."""
        gone = self.network.link.dead | self.liars
        return [peer for name, peer in self.peers.items() if name not in gone]

    def on_head_changed(self, peer: SimulatedPeer) -> None:
        assert peer.name in self.liars or peer.chain.digest not in self.invented_heads, "an invented chain is followed"
        if peer.name in self.liars:
            return
        self.organiser.check_head(peer.chain.head, peer.steering)
        self._check_voters(peer)
        if peer.chain.round >= self.scenario.rounds:
            self._unfinished.discard(peer.name)
        else:
            self._unfinished.add(peer.name)

    def _check_voters(self, peer: SimulatedPeer) -> None:
        """No stranger has a vote, all on one head have the same voters, and nobody knew the order of the leaders."""
        electorate, head = peer.chain.electorate, peer.chain.head
        assert not electorate.voters & self.strangers, "a stranger has a vote"
        known = self._electorates.setdefault(head.digest, electorate.digest)
        assert known == electorate.digest, "two electorates of one head"
        if head.round:
            assert leaders_by_rank(head.digest) != self._foreseen_leaders, "the leaders were known in advance"

    def is_done(self) -> bool:
        """All that live, or will again, have ended all rounds; where forks are allowed, on one chain."""
        if not self._unfinished <= self.network.link.dead or self.returning:
            return False
        if self.double_decisions.places:
            excluded = [peer.loop.conduct.excluded for peer in self.alive()]
            return self.is_on_one_chain() and self.double_decisions.are_proved_to(excluded)
        return not self.forks_allowed or self.is_on_one_chain()

    def is_on_one_chain(self) -> bool:
        return len({peer.chain.head for peer in self.alive()}) == 1

    def needed(self, action: ApplyCommit) -> list[PartBlob]:
        """What a peer has to have to apply that."""
        return list(enumerate_parts(action.commit.body.parts) or part_blobs_of(action.contributions))

    def _watch_groups(self, name: PeerId, action: LoopAction) -> None:
        """Nobody asks for anything outside of its group."""
        if isinstance(action, Send) and action.signed.kind == "roster":
            body = self.network.open(action.signed).body
            self._rosters.setdefault(body.base, set()).add(tuple(entry.sender for entry in body.contributions))
        elif isinstance(action, FetchBlob) and isinstance(topology := self.scenario.settings().topology, Groups):
            rosters = self._rosters.get(self.peers[name].chain.digest, set())
            circles = [topology.partners(action.round, roster).get(name, ()) for roster in rosters]
            owner = self.ledger.owners[action.part_blob.blob.digest]
            assert any(owner in circle for circle in circles), "a blob from outside of the group"

    def on_decided(self, peer: PeerId, commit: SignedMessage[Commit], certificate: Signed) -> None:
        if peer in self.liars:
            return
        body = commit.body
        contents = self.decisions.setdefault((body.round, body.base), {})
        votes = self.network.open(certificate).body.by_sender
        contents.setdefault(body.content_digest, set()).update({peer, *votes} - self.liars)
        self.organiser.check_decided(body, self.peers[peer].chain.head)
        gone = self.network.link.dead - self.returning
        known = [content for content, peers in contents.items() if not peers <= gone]
        if len(known) > 1 and not self.forks_allowed:
            voters = self.peers[peer].chain.electorate_at(body.base).voters or self.peers.keys()
            self.double_decisions.record(body, voters)
        senders = [entry.sender for entry in body.contributions]
        assert senders == sorted(set(senders)) and senders, "contributions twice, out of order, or none at all"
        assert self.peers.keys() >= set(senders), "contributions of keys that nobody has"
        if self.scenario.exchange == "butterfly":
            sums = tuple(fake_reduce(part, body.contributions) for part in range(self.scenario.parts))
            assert body.parts == sums, "a sum of something else, or in another order"

    def check_applied(self, peer: PeerId, commit: Commit, reported: AppliedContributions, store: Set[Digest]) -> None:
        """What a peer tells of a round that it has applied is what went into its state."""
        group = {entry.sender for entry in self.scenario.settings().topology.contributions_for(commit, peer)}
        self.ledger.check_applied(reported, commit, group, store)

    def on_given_up(self, peer: PeerId, commit: Commit) -> None:
        """It could not have what that decision takes, and goes by it no more."""
        contents = self.decisions.get((commit.round, commit.base), {})  # nothing is, of a replay
        contents.get(commit.content_digest, set()).discard(peer)

    def measure_tables(self, peer: SimulatedPeer) -> None:
        entries, number = count_entries(peer), peer.loop.session.number
        self.peaks[number] = max(self.peaks.get(number, 0), entries)
        assert entries <= max_entries(self.scenario), f"the tables of {peer.name[-4:]} grew to {entries} entries"

    def forks(self) -> list[tuple[int, Digest]]:
        return [place for place, contents in self.decisions.items() if len(contents) > 1]

    def kill(self, name: PeerId, away: float | None = None) -> None:
        """`away`: seconds after which it comes back with what its disk has; None: never."""
        self.network.record(name, "is killed" if away is None else f"is killed, for {away:.1f} s")
        peer = self.peers[name]
        for commit in peer.unsaid_decisions():  # what it has decided is decided, even if nobody else can know
            self.on_decided(name, commit, peer.certificate_of(commit))
        self.network.link.dead.add(name)
        if away is not None:
            self.returning.add(name)
            self.network.schedule(away, lambda: self._bring_back(name))

    def _bring_back(self, name: PeerId) -> None:
        self.network.record(name, "comes back")
        self.network.link.dead.discard(name)
        self.network.link.frozen.pop(name, None)
        self.returning.discard(name)
        self.peers[name].restart()
        self.on_head_changed(self.peers[name])

    def freeze(self, name: PeerId, seconds: float) -> None:
        """It hears and does nothing; afterwards all comes at once, to a clock that has jumped."""
        self.network.record(name, f"freezes for {seconds:.1f} s")
        until = self.network.now + seconds
        self.network.link.frozen[name] = until
        self.network.schedule(seconds, lambda: self._thaw(name, until))

    def _thaw(self, name: PeerId, until: float) -> None:
        if self.network.link.frozen.get(name) == until:
            del self.network.link.frozen[name]

    def split(self, islands: dict[PeerId, int], seconds: float) -> None:
        self.network.record("network", f"splits for {seconds:.1f} s: {sorted(islands.values())}")
        self.network.link.islands = islands
        self.network.schedule(seconds, islands.clear)

    def block(self, directions: set[tuple[PeerId, PeerId]], seconds: float) -> None:
        """Nothing passes these ways, but all passes in the opposite direction."""
        self.network.record("network", f"loses {len(directions)} directions for {seconds:.1f} s")
        blocked = self.network.link.blocked
        blocked |= directions
        self.network.schedule(seconds, lambda: blocked.difference_update(directions))

"""All peers of a virtual network, what may befall them, and what must hold whatever befalls them."""

from collections.abc import Callable, Set

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.chain import genesis
from protocol.rounds.entries import Entries
from protocol.rounds.events import Action, Fetch, Finish, Send
from protocol.rounds.grouping import drawn, group_of
from protocol.rounds.statements import Commit, Digest, Portion, Statement, portions
from protocol.rounds.view import portions_of
from tests.simulation.network import NAMES, RUN_ID, Network, Scenario, sum_of
from tests.simulation.peers import HEARTBEAT, Peer
from tests.simulation.progress import Ledger
from tests.simulation.tables import entries_of, most_entries


class Swarm:
    """`decisions`: by round and base, the contents that were decided, and who voted for them or knows of it.

    `forks_allowed`: two may be. Otherwise only where the first has died with all of these.
    """

    def __init__(self, scenario: Scenario, seed: int, forks_allowed: bool = False) -> None:
        self.scenario = scenario
        self.forks_allowed = forks_allowed
        self.network = Network(scenario, seed)
        self.ledger = Ledger(genesis(RUN_ID))
        self.skips: list[tuple[PeerId, PeerId | None, str]] = []
        self.decisions: dict[tuple[int, Digest], dict[bytes, set[PeerId]]] = {}
        self.watches: list[Callable[[PeerId, Action], None]] = []
        if scenario.exchange == "groups":
            self.watches.append(self._watch_groups)
        self.returning: set[PeerId] = set()  # dead, but not for good
        self.twin: PeerId | None = None  # offers what others do, one byte shorter
        self.invented: set[Blob] = set()  # by it: there are none of that digest and size
        self.peaks: dict[int, int] = {}  # by round, the most entries in the tables of any peer
        self._rosters: dict[Digest, set[tuple[PeerId, ...]]] = {}  # by the base that they continue
        self.peers = {name: Peer(name, self.network, self) for name in NAMES[: scenario.peers]}
        self._unfinished = set(self.peers)

    def start(self) -> None:
        head = next(iter(self.peers.values())).chain.head
        for peer in self.peers.values():
            peer.records = {other: (head, 0.0) for other in self.peers if other != peer.name}
        for peer in self.peers.values():
            peer.begin(dict.fromkeys(self.peers, 0.0))
            peer.after(self.network.random.uniform(0, HEARTBEAT), peer.beat)

    def alive(self) -> list[Peer]:
        return [peer for name, peer in self.peers.items() if name not in self.network.link.dead]

    def moved(self, peer: Peer) -> None:
        if peer.chain.round >= self.scenario.rounds:
            self._unfinished.discard(peer.name)
        else:
            self._unfinished.add(peer.name)

    def is_done(self) -> bool:
        """All that live, or will again, have ended all rounds; where forks are allowed, on one chain."""
        if not self._unfinished <= self.network.link.dead or self.returning:
            return False
        return not self.forks_allowed or len({peer.chain.head for peer in self.alive()}) == 1

    def needed(self, commit: Commit, peer: PeerId) -> dict[Portion, tuple[PeerId, ...]]:
        """What that peer has to have, and whom it may ask."""
        mine = group_of(commit, peer, self.scenario.settings())
        sources = tuple(entry.sender for entry in mine) if self.scenario.exchange == "groups" else tuple(self.peers)
        return dict.fromkeys(portions(commit.parts) or portions_of(mine), sources)

    def _watch_groups(self, name: PeerId, action: Action) -> None:
        """Nobody asks for anything outside of its group."""
        if isinstance(action, Send) and action.signed.kind == "roster":
            body = self.network.open(action.signed).body
            self._rosters.setdefault(body.base, set()).add(tuple(entry.sender for entry in body.contributions))
        elif isinstance(action, Fetch):
            machine, settings = self.peers[name].round, self.scenario.settings()
            rosters = self._rosters.get(self.peers[name].chain.digest, set())
            circles = [drawn(settings, machine.number, roster).get(name, ()) for roster in rosters]
            owner = self.ledger.owners[action.portion.blob.digest]
            assert any(owner in circle for circle in circles), "a blob from outside of the group"

    def decided(self, peer: PeerId, commit: Statement[Commit]) -> None:
        body = commit.body
        contents = self.decisions.setdefault((body.round, body.base), {})
        votes = self.network.open(self.peers[peer].round.decision[1]).body.by_sender
        contents.setdefault(body.content, set()).update([peer, *votes])
        gone = self.network.link.dead - self.returning
        known = [content for content, peers in contents.items() if not peers <= gone]
        assert self.forks_allowed or len(known) <= 1, "two commits of one round"
        senders = [entry.sender for entry in body.contributions]
        assert senders == sorted(set(senders)) and senders, "contributions twice, out of order, or none at all"
        if self.scenario.exchange == "butterfly":
            sums = tuple(sum_of(part, body.contributions) for part in range(self.scenario.parts))
            assert body.parts == sums, "a sum of something else, or in another order"

    def check_told(self, peer: PeerId, commit: Commit, told: Entries, store: Set[Digest]) -> None:
        """What a peer tells of a round that it has applied is what went into its state."""
        group = {entry.sender for entry in group_of(commit, peer, self.scenario.settings())}
        self.ledger.check_told(told, commit, group, store)

    def given_up(self, peer: PeerId, commit: Commit) -> None:
        """It could not have what that decision takes, and goes by it no more."""
        self.decisions[commit.round, commit.base][commit.content].discard(peer)

    def measure(self, peer: Peer) -> None:
        entries, number = entries_of(peer), peer.round.number
        self.peaks[number] = max(self.peaks.get(number, 0), entries)
        assert entries <= most_entries(self.scenario), f"the tables of {peer.name[-4:]} grew to {entries} entries"

    def forks(self) -> list[tuple[int, Digest]]:
        return [place for place, contents in self.decisions.items() if len(contents) > 1]

    def kill(self, name: PeerId, away: float | None = None) -> None:
        """`away`: seconds after which it comes back with what its disk has; None: never."""
        self.network.say(name, "is killed" if away is None else f"is killed, for {away:.1f} s")
        for action in self.peers[name].waiting:
            if isinstance(action, Finish):  # what it has decided is decided, even if nobody else can know
                self.decided(name, action.commit)
        self.network.link.dead.add(name)
        if away is not None:
            self.returning.add(name)
            self.network.schedule(away, lambda: self._bring_back(name))

    def _bring_back(self, name: PeerId) -> None:
        self.network.say(name, "comes back")
        self.network.link.dead.discard(name)
        self.network.link.frozen.pop(name, None)
        self.returning.discard(name)
        self.peers[name].come_back()
        self.moved(self.peers[name])

    def freeze(self, name: PeerId, seconds: float) -> None:
        """It hears and does nothing; afterwards all comes at once, to a clock that has jumped."""
        self.network.say(name, f"freezes for {seconds:.1f} s")
        until = self.network.now + seconds
        self.network.link.frozen[name] = until
        self.network.schedule(seconds, lambda: self._thaw(name, until))

    def _thaw(self, name: PeerId, until: float) -> None:
        if self.network.link.frozen.get(name) == until:
            del self.network.link.frozen[name]

    def split(self, islands: dict[PeerId, int], seconds: float) -> None:
        self.network.say("network", f"splits for {seconds:.1f} s: {sorted(islands.values())}")
        self.network.link.islands = islands
        self.network.schedule(seconds, islands.clear)

    def block(self, directions: set[tuple[PeerId, PeerId]], seconds: float) -> None:
        """Nothing passes these ways, but all passes in the opposite direction."""
        self.network.say("network", f"loses {len(directions)} directions for {seconds:.1f} s")
        blocked = self.network.link.blocked
        blocked |= directions
        self.network.schedule(seconds, lambda: blocked.difference_update(directions))

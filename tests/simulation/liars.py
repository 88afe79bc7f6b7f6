"""Peers of the simulation that lie: each breaks the protocol in one way, with a valid key of its own.

A liar runs the same loop as everybody, so that it knows all that an honest peer knows, and changes what it sends,
serves or sums. Liars know one another, and vote for what the others propose.
"""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from node.loop.peers.catch_up import SyncOffer
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.leader import Leader, Proposal
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.kinds import NO_BASIS, Acknowledgement, Basis, CommitCertificate, kind_of
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.simulation.virtual.disk import state_of
from tests.simulation.virtual.network import NAMES, SHAPES, make_signer
from tests.simulation.virtual.peers import SimulatedPeer
from tests.simulation.work_accounting import NONE

if TYPE_CHECKING:
    from tests.simulation.virtual.swarm import SimulatedSwarm

MADE_UP_KEYS = NAMES[12:15]  # no peer of the simulation has them


class DoubleDecisions:
    """The rounds that were decided twice, which only liars with too many votes may bring about, and not unproved.

    `places`: by round and base, the liars that signed two commits of one view in that round.
    """

    def __init__(self, liars: Set[PeerId]) -> None:
        self.places: dict[tuple[int, Digest], frozenset[PeerId]] = {}
        self._liars = liars
        self._forgotten: set[tuple[int, Digest]] = set()  # rounds in which a liar led as if nothing bound anybody
        self._signed: dict[tuple[PeerId, int, Digest, int], set[Digest]] = {}  # commits by signer, round, base and view

    def note(self, commit: SignedMessage[Commit]) -> None:
        """Record a commit that a liar signed."""
        body = commit.body
        self._signed.setdefault((commit.sender, body.round, body.base, body.view), set()).add(commit.digest)

    def note_forgotten(self, number: int, base: Digest) -> None:
        """Record a round in which a liar forgot what binds the members, which nothing proves among three voters."""
        self._forgotten.add((number, base))

    def record(self, commit: Commit, voters: Set[PeerId]) -> None:
        """Record a second decision, which breaks an invariant where liars are few, or none of them is guilty."""
        lying = voters & self._liars
        few = f"two commits of one round, though only {len(lying)} of {len(voters)} voters lie"
        assert 3 * len(lying) >= len(voters), few
        place = commit.round, commit.base
        signers = [key[0] for key, digests in self._signed.items() if key[1:3] == place and len(digests) > 1]
        assert signers or place in self._forgotten, "two commits of one round, and no liar signed two of one view"
        self.places[place] = frozenset(signers)

    def are_proved_to(self, excluded: Iterable[frozenset[PeerId]]) -> bool:
        """Return whether all peers exclude one of the guilty; `excluded` has the keys that each of them excludes."""
        known = self._liars & frozenset.intersection(*excluded)
        return all(known & guilty for guilty in self.places.values() if guilty)


class LyingPeer(SimulatedPeer):
    """A liar, as its subclasses say; `victims` are the honest half that it tells another story."""

    @property
    def victims(self) -> frozenset[PeerId]:
        honest = sorted(self.swarm.peers.keys() - self.swarm.liars)
        return frozenset(honest[len(honest) // 2 :])

    def send(self, peer: PeerId, signed: Signed) -> None:
        message = self.network.open(signed)
        if message.sender == self.name and isinstance(message.body, Commit):
            self.swarm.double_decisions.note(message)
        super().send(peer, signed)

    def sign(self, body: Any, name: PeerId | None = None) -> SignedMessage[Any]:
        """Sign a body, which others may refuse, with the liar's key, or with one that it has made up."""
        return SignedMessage.of(make_signer(name or self.name)(kind_of(body), body.to_wire()), body)

    def lie(self) -> None:
        """Count that the liar does now what an honest peer does not."""
        self.swarm.lies_told.append(self.name)

    def say(self, peers: Iterable[PeerId], message: SignedMessage[Any]) -> None:
        """Send a message of our own making."""
        for peer in sorted(peers):
            if peer != self.name:
                super().send(peer, message.signed)

    def make_blobs(self, owner: PeerId, text: str) -> tuple[Blob, ...]:
        """Return the blobs of another contribution, of which the ledger knows that no work is in it."""
        parts = tuple(Blob.of(f"{text} {owner} {part}".encode()) for part in range(self.network.scenario.parts))
        self.swarm.ledger.contents[parts] = NONE
        self.swarm.ledger.owners.update((blob.digest, owner) for blob in parts)
        self.swarm.ledger.made_for.update((blob.digest, self.chain.round) for blob in parts)
        self.store |= {blob.digest for blob in parts}
        return parts


class ServesNothing(LyingPeer):
    """Announces contributions and sums, and serves none of them: ghosts."""

    def serves(self, digest: Digest) -> bool:
        self.lie()
        return False


class ContributesTwice(LyingPeer):
    """Sends half of the peers another contribution than the other half."""

    def send(self, peer: PeerId, signed: Signed) -> None:
        message = self.network.open(signed)
        if peer in self.victims and isinstance(message.body, Contribution) and message.sender == self.name:
            self.lie()
            parts = self.make_blobs(self.name, f"twice {message.body.round}")
            signed = self.sign(replace(message.body, parts=parts)).signed
        super().send(peer, signed)


class ProposesTwice(LyingPeer):
    """Proposes one commit to half of the peers and another one to the rest, and votes for all that is proposed."""

    def __init__(self, name: PeerId, network: Any, swarm: "SimulatedSwarm") -> None:
        super().__init__(name, network, swarm)
        # By proposal, of both, and whether they are confirmations.
        self._votes: dict[tuple[Digest, bool], dict[PeerId, SignedMessage[Acknowledgement]]] = {}
        self._first: set[Digest] = set()
        self._second: dict[Digest, SignedMessage[Commit]] = {}

    def send(self, peer: PeerId, signed: Signed) -> None:
        message = self.network.open(signed)
        if isinstance(message.body, Commit) and message.sender == self.name:
            second = self._other_commit(message)
            self._first.add(message.digest)
            self.lie()
            signed = second.signed if peer in self.victims else signed
        super().send(peer, signed)

    def _other_commit(self, message: SignedMessage[Commit]) -> SignedMessage[Commit]:
        """Return a commit with one contribution fewer, or if its sums are signed, with other words about the same."""
        body = message.body
        if body.parts:
            second = self.sign(replace(body, left_out=tuple(MADE_UP_KEYS[:1])))
        else:
            kept = body.contributions[:-1] or body.contributions
            is_grouped = self.network.scenario.exchange == "groups"
            left_out = {*body.left_out, body.contributions[-1].sender} if is_grouped and len(kept) > 1 else ()
            second = self.sign(replace(body, contributions=kept, left_out=tuple(sorted(left_out))))
        self._second.setdefault(second.digest, second)
        return second

    def hear(self, message: SignedMessage[Any]) -> None:
        match message.body:
            case Commit():
                self._vote_for(message.sender, Acknowledgement.of(message, self._basis))
            case CommitCertificate() as body if body.acknowledgements:
                said = body.acknowledgements[0].body
                self._vote_for(message.sender, replace(said, confirms=True))
            case Acknowledgement() as body if body.proposal in self._first | self._second.keys():
                place = body.proposal, body.confirms
                self._votes.setdefault(place, {})[message.sender] = message
                self._decide(place)
        super().hear(message)

    @property
    def _basis(self) -> Basis:
        machine = self.loop.session.machine
        return machine.basis if machine is not None else NO_BASIS

    def _vote_for(self, leader: PeerId, vote: Acknowledgement) -> None:
        """Acknowledge and confirm whatever another peer proposes, whatever we have acknowledged before."""
        if leader != self.name and vote.basis != NO_BASIS:
            self.say([leader], self.sign(vote))

    def _decide(self, place: tuple[Digest, bool]) -> None:
        """Show all votes for one of our two commits to those that have it; they count them on their own."""
        votes = self._votes[place]
        body = next(iter(votes.values())).body
        votes.setdefault(self.name, self.sign(body))
        ordered = tuple(votes[peer] for peer in sorted(votes))
        certificate = self.sign(CommitCertificate.of(ordered))
        honest = self.swarm.peers.keys() - self.swarm.liars
        self.say(self.victims if place[0] in self._second else honest - self.victims, certificate)


class InventsContributors(LyingPeer):
    """Leads with contributions of keys that nobody has seen."""

    def send(self, peer: PeerId, signed: Signed) -> None:
        message = self.network.open(signed)
        if isinstance(message.body, Contribution) and message.sender == self.name:
            self._make_up(message.body)
        super().send(peer, signed)

    def _make_up(self, model: Contribution) -> None:
        """Let our own round machine believe that made-up keys have contributed, and that we hold it all."""
        machine = self.loop.session.machine
        if machine is None or machine.number != model.round or MADE_UP_KEYS[0] in machine._knowledge.contributions:
            return
        self.lie()
        machine._state.known_trainers |= set(MADE_UP_KEYS)
        for key in MADE_UP_KEYS:
            entry = self.sign(replace(model, parts=self.make_blobs(key, f"made up {model.round}")), key)
            machine._knowledge.learn_contribution(entry)
            machine._knowledge.add_held_parts(entry.body.part_blobs)


class MakesUpSums(LyingPeer):
    """Reduces its parts to noise, and serves that."""

    def sum_of(self, part: int, contributions: tuple[SignedMessage[Contribution], ...]) -> Blob:
        self.lie()
        noise = hashlib.sha256(f"noise {self.name} {part} {self.chain.round}".encode()).digest()
        return Blob.of(noise)


class LeadsInSilence(LyingPeer):
    """Contributes, and keeps to itself all that a leader owes the others."""

    def send(self, peer: PeerId, signed: Signed) -> None:
        if signed.kind in ("roster", "inclusion", "commit", "decision"):
            self.lie()
        else:
            super().send(peer, signed)


class StopsHalfway(LyingPeer):
    """Leads until the proposal, and tells nobody but one of the decision."""

    def send(self, peer: PeerId, signed: Signed) -> None:
        if signed.kind == "decision" and peer not in sorted(self.victims)[:1]:
            self.lie()
        else:
            super().send(peer, signed)


def _nothing() -> None:
    """Stand for a leader's search for what it has to repeat."""


class ForgetsDecisions(LyingPeer):
    """Leads later views as if nobody had acknowledged anything, and keeps what it decides itself from almost everybody.

    What is decided in the first view it tells one victim, once the leader of a later one proposes something else. It
    signs one commit a view.
    """

    def __init__(self, name: PeerId, network: Any, swarm: "SimulatedSwarm") -> None:
        super().__init__(name, network, swarm)
        self._kept: tuple[SignedMessage[CommitCertificate], ChainHead] | None = None

    def announced_head(self) -> ChainHead:
        if self._kept is None or self.chain.round != self._kept[1].round + 1 or self._is_overtaken():
            return super().announced_head()
        return self._kept[1]

    def _is_overtaken(self) -> bool:
        heads = (head for head, _ in self.gossip.records.values())
        return self._kept is not None and any(head.round > self._kept[1].round for head in heads)

    def send(self, peer: PeerId, signed: Signed) -> None:
        message = self.network.open(signed)
        body = message.body
        if not isinstance(body, CommitCertificate) or body.view or not self._is_decision(body):
            return super().send(peer, signed)
        before = next((head for head in self.recent_states if head.round == body.round), None)
        if before is not None and (self._kept is None or self._kept[0].body.round < body.round):
            self._kept = message, before
        self.lie()

    def _is_decision(self, certificate: CommitCertificate) -> bool:
        """Return whether a certificate ends a round: the machine shows it when its own round is over."""
        machine = self.loop.session.machine
        return machine is None or machine.number != certificate.round or machine.commit is not None

    def hear(self, message: SignedMessage[Any]) -> None:
        body, machine = message.body, self.loop.session.machine
        kept = self._kept[0] if self._kept is not None else None
        if kept is not None and isinstance(body, Commit) and body.round == kept.body.round and body.view:
            self.say(sorted(self.victims)[:1], kept)
            self.say([message.sender], self.sign(Acknowledgement.of(message, kept.body.basis)))
        role = machine._state.leader_role if machine is not None and machine.view else None
        if role is not None and "next_proposal" not in vars(role):
            self._forget(role)
        super().hear(message)

    def _forget(self, role: Leader) -> None:
        """Let a leader of our own propose as if no member were bound, and leave one contribution out."""
        next_proposal = role.next_proposal

        def propose(now: float) -> Proposal | None:
            proposal = next_proposal(now)
            if proposal is None:
                return None
            self.lie()
            self.swarm.double_decisions.note_forgotten(self.chain.round, self.chain.digest)
            if proposal.parts:
                return proposal._replace(left_out=(MADE_UP_KEYS[0],))
            kept, left_out = proposal.contributions[:-1], {*proposal.left_out, proposal.contributions[-1].sender}
            if not kept:
                return proposal
            is_grouped = self.network.scenario.exchange == "groups"
            return proposal._replace(contributions=kept, left_out=tuple(sorted(left_out)) if is_grouped else ())

        role.locked_proposal = _nothing  # type: ignore[method-assign]
        role.next_proposal = propose  # type: ignore[method-assign]


class InventsHistory(LyingPeer):
    """Announces a longer chain than that of the others, and shows commits that nobody but itself has acknowledged."""

    INVENTED_ROUNDS = 3

    def __init__(self, name: PeerId, network: Any, swarm: "SimulatedSwarm") -> None:
        super().__init__(name, network, swarm)
        self._known: Chain | None = None  # the last invention

    def announced_head(self) -> ChainHead:
        return self._invented().head if self.chain.round else self.chain.head

    def show_chain(self) -> SyncOffer:
        self.lie()
        chain = self._invented()
        return SyncOffer(ChainOffer(chain.log, chain.head, state_of(chain.head).digest), state_of(chain.head))

    def _invented(self) -> Chain:
        """Return our chain with more commits, of which the first names the true state."""
        if self._known is not None and self._known.has_head(self.chain.digest):
            return self._known
        chain = Chain(self.chain.head, self.chain.log)
        for _ in range(self.INVENTED_ROUNDS):
            parts = self.make_blobs(self.name, f"invented {chain.round}")
            body = Contribution(chain.round, chain.digest, "none", SHAPES, 1000, 10, 0.1, parts)
            sums = parts if self.network.scenario.exchange == "butterfly" else ()
            commit = self.sign(Commit(chain.round, 0, chain.digest, (self.sign(body),), sums))
            basis = Basis(state_of(chain.head).digest, chain.electorate.digest, chain.tokens)
            vote = self.sign(Acknowledgement(chain.round, 0, commit.digest, basis))
            chain.append(CertifiedCommit(commit, CommitCertificate.of([vote])))
            self.swarm.invented_heads.add(chain.digest)
        self._known = chain
        return chain


LIARS: Mapping[str, type[LyingPeer]] = {
    "ghost": ServesNothing,
    "two contributions": ContributesTwice,
    "two commits": ProposesTwice,
    "invented contributors": InventsContributors,
    "made up sums": MakesUpSums,
    "silent leader": LeadsInSilence,
    "half decision": StopsHalfway,
    "forgotten decision": ForgetsDecisions,
    "invented history": InventsHistory,
}

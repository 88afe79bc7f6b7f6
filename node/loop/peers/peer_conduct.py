"""Apply the conduct of peers to the round loop: messages, membership, proofs to pass on. PURE."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from node.loop.actions import LoopAction, ReportConduct, SaveProofs
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.conduct import Conduct, PeerConvicted, Proof, RoundConduct
from protocol.consensus.chain import Chain, ChainLog
from protocol.consensus.events import MembershipChanged, MisbehaviourSeen, Rejected, Send
from protocol.consensus.machine import Signer
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import CommitCertificate, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId

NEWCOMER_HELPERS = 2  # peers that tell a newcomer the known proofs
MAX_PROOFS_TOLD = 16


class PeerConduct:
    """The conduct of the peers of one replica.

    Args:
        peer_id: our own id.
        proofs, convictions: those of earlier processes.
        signer: signs the proofs that we find.
    """

    def __init__(
        self,
        peer_id: PeerId,
        proofs: Iterable[SignedMessage[Proof]],
        signer: Signer,
        convictions: Iterable[PeerConvicted] = (),
    ) -> None:
        self.conduct = Conduct(peer_id, proofs, convictions)
        self._peer_id = peer_id
        self._signer = signer
        self.unfiltered = self._snapshot = SwarmSnapshot({})
        self._seen_excluded = self.excluded  # without them was the last snapshot
        self._number = 0
        self._lines: tuple[str, ...] = ()
        self._actions: list[LoopAction] = []

    @property
    def excluded(self) -> frozenset[PeerId]:
        """Return the keys whose misdeeds are proved."""
        return self.conduct.excluded

    @property
    def has_news(self) -> bool:
        """Return whether keys are excluded that the last snapshot still has."""
        return self.conduct.excluded != self._seen_excluded

    def receive(self, messages: Iterable[SignedMessage[Any]], number: int) -> list[SignedMessage[Any]]:
        """Return the messages that count, without those of excluded keys, and learn from all of them.

        Proposals and certificates of excluded keys may bind honest members, so the round machine decides about them.
        """
        counted = []
        for message in messages:
            if isinstance(message.body, Proof):
                self._learn(message)
            elif self.conduct.is_excluded(message.sender) and not isinstance(message.body, Commit | CommitCertificate):
                self._actions.append(Rejected(message.sender, "excluded"))
            else:
                for proof in self.conduct.observe(message, number):
                    self._found(proof)
                counted.append(message)
        return counted

    def compare(self, ours: ChainLog, theirs: ChainLog) -> None:
        """Learn from the chain of another peer: a leader may have signed two commits of one view."""
        for proof in self.conduct.compare(*([entry.commit for entry in log.commits] for log in (ours, theirs))):
            self._found(proof)

    def accuse(self, seen: MisbehaviourSeen, number: int) -> bool:
        """Strike a peer for a false statement; return whether it is about the open round or the next one."""
        if not number <= seen.round <= number + 1 or seen.peer not in self._snapshot.trainers:
            return False
        self.conduct.accuse(seen.peer, seen.round)
        self._report()
        return True

    def strike(self, peers: Iterable[PeerId], number: int) -> None:
        """Strike peers that do not serve what they announced in a round, before the round ends."""
        for peer in peers:
            self.conduct.strike(peer, number)
        self._report()

    def convict(self, conviction: PeerConvicted) -> None:
        """Exclude a peer that two thirds of the voters contradict; the next event saves and shows it."""
        if self.conduct.convict(conviction):
            self._save()
            self._report()

    def _found(self, proof: Proof) -> None:
        self._actions.append(Rejected(proof.culprit, "proved"))
        signed = SignedMessage.of(self._signer(kind_of(proof), proof.to_wire()), proof)
        self.conduct.learn(signed)
        self._spread(signed)
        self._report()

    def _learn(self, proof: SignedMessage[Proof]) -> None:
        if self.conduct.learn(proof):
            self._actions.append(Rejected(proof.body.culprit, "proved"))
            self._spread(proof)
            self._report()

    def _spread(self, proof: SignedMessage[Proof]) -> None:
        """Save a proof, and pass it on to all others, once for each culprit; a large one counts here alone."""
        peers = tuple(sorted(self._snapshot.trainers - {self._peer_id, proof.body.culprit}))
        self._save()
        if peers and self.conduct.is_small(proof.body):
            self._actions.append(Send(peers, proof.signed))

    def _save(self) -> None:
        conduct = self.conduct
        self._actions.append(SaveProofs(tuple(conduct.proofs.values()), tuple(conduct.convictions.values())))

    def view(self, snapshot: SwarmSnapshot) -> SwarmSnapshot:
        """Return a snapshot without excluded peers: they count as departed, so that they lose their votes at once."""
        newcomers, self.unfiltered = snapshot.trainers - self.unfiltered.trainers, snapshot
        for peer in sorted(newcomers - {self._peer_id}):
            self._tell_newcomer(peer, snapshot.trainers)
        self._seen_excluded = self.conduct.excluded
        if excluded := self._seen_excluded:
            peers = {peer: state for peer, state in snapshot.peers.items() if peer not in excluded}
            left = {**snapshot.left, **dict.fromkeys(excluded, PeerState(None))}
            snapshot = replace(snapshot, peers=peers, left=left, _trainers_at={})
        self._snapshot = snapshot
        return snapshot

    def _tell_newcomer(self, newcomer: PeerId, trainers: Collection[PeerId]) -> None:
        others = sorted(
            (peer for peer in trainers if peer != newcomer),
            key=lambda peer: hashlib.sha256(f"{peer} {newcomer}".encode()).digest(),
        )
        if self._peer_id in others[:NEWCOMER_HELPERS]:
            small = [proof for proof in self.conduct.proofs.values() if self.conduct.is_small(proof.body)]
            for proof in small[:MAX_PROOFS_TOLD]:
                self._actions.append(Send((newcomer,), proof.signed))

    def membership(self, chain: Chain, avoided: frozenset[PeerId]) -> MembershipChanged:
        """Return the members of the round after our head, and what their conduct means for it."""
        membership, conduct = self._snapshot.membership(self._peer_id, chain, avoided), self.conduct
        self._number, live = chain.round, membership.peers
        return replace(
            membership,
            excluded=conduct.excluded,
            doubted=conduct.doubted,
            set_aside=frozenset(conduct.serving.struck(chain.round, live)),
            not_leading=frozenset(conduct.leading.struck(chain.round, live)),
        )

    def close_round(self, seen: RoundConduct | None) -> None:
        """Take in the conduct that a decided round showed."""
        if seen is not None:
            self._number = seen.round + 1
            self.conduct.close_round(seen)
            self._report()

    def _report(self) -> None:
        lines = tuple(self.conduct.describe(self._number, self._snapshot.trainers))
        if lines != self._lines:
            self._lines = lines
            self._actions.append(ReportConduct(lines))

    def take_actions(self) -> list[LoopAction]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

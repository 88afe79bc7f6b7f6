"""The memory of one node for the conduct of its peers: excluded keys, strikes, and how often leaders left peers out."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from protocol.conduct.proofs import MAX_PROOF_BYTES, Place, Proof, place_of
from protocol.conduct.strikes import Strikes
from protocol.consensus.messages.contributions import Commit, Roster
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from protocol.recent import RecentTable

MAX_STATEMENTS_PER_PEER = 64
MAX_EXCLUDED = 1024
MAX_LEADERS = 1024
LEFT_OUT_STRIKE = 3  # times that a leader leaves the same ready peer out, more than it includes it
KEPT_ROUNDS = 2
NOT_SERVED = "its contribution or sum could not be fetched"
FALSE_STATEMENT = "it signed a false or malformed statement"


def _statements_in(message: SignedMessage[Any]) -> tuple[SignedMessage[Any], ...]:
    """Return a message, and the contributions that it lists."""
    return message, *(message.body.contributions if isinstance(message.body, Roster | Commit) else ())


@dataclass(frozen=True)
class RoundConduct:
    """The conduct of the others in one decided round, as a peer saw it.

    `served`: contributors whose work is in the commit. `withheld`: contributors and reducers that announced something
    and never served it. `failed_leaders`: leaders that were silent, stalled the round or proposed falsehoods, with the
    reason. `leader`: that of the commit. `left_out`: contributors that it left out although their work was ready.
    `false_reducers`: reducers that announced another sum than this peer computed. `members`: their number.
    """

    round: int
    leader: PeerId
    served: frozenset[PeerId] = frozenset()
    withheld: frozenset[PeerId] = frozenset()
    failed_leaders: dict[PeerId, str] = field(default_factory=dict)
    left_out: frozenset[PeerId] = frozenset()
    false_reducers: frozenset[PeerId] = frozenset()
    members: int = 0


class Conduct:
    """Finds proofs in the statements that pass by, and turns rounds into strikes; owned by the round loop."""

    def __init__(self, me: PeerId, proofs: Iterable[SignedMessage[Proof]] = ()) -> None:
        self._me = me
        self._statements: dict[PeerId, RecentTable[Place, SignedMessage[Any]]] = {}
        self.proofs: dict[PeerId, SignedMessage[Proof]] = {proof.body.culprit: proof for proof in proofs}
        self.found: dict[PeerId, Proof] = {}  # those that this peer found itself
        self.wrong_sums: dict[PeerId, int] = {}  # the round in which this peer computed another sum
        self._convicted: set[PeerId] = set()  # by a majority of auditors
        self.serving = Strikes()
        self.leading = Strikes()
        self._led: Counter[PeerId] = Counter()
        self._left_out: Counter[tuple[PeerId, PeerId]] = Counter()  # leader, contributor

    @property
    def excluded(self) -> frozenset[PeerId]:
        """Return the keys whose misdeeds are proved."""
        return frozenset({*self.proofs, *self.found, *self.wrong_sums, *self._convicted})

    def is_excluded(self, peer: PeerId) -> bool:
        """Return whether the misdeeds of a key are proved."""
        return any(peer in keys for keys in (self.proofs, self.found, self.wrong_sums, self._convicted))

    def convict(self, peer: PeerId) -> None:
        """Exclude a peer whose contribution a majority of its auditors found to be other work than it says."""
        if peer != self._me and len(self.excluded) < MAX_EXCLUDED:
            self._convicted.add(peer)

    def accuse(self, peer: PeerId, number: int) -> None:
        """Strike a peer that signed a statement about a round that no honest peer signs; it cannot be passed on."""
        if peer != self._me:
            self.serving.strike(peer, number, FALSE_STATEMENT)
            self.leading.strike(peer, number, FALSE_STATEMENT)

    def strike(self, peer: PeerId, number: int, reason: str = NOT_SERVED) -> None:
        """Strike a peer that does not serve what it announced in a round, or fails as an auditor or under audits."""
        if peer != self._me:
            self.serving.strike(peer, number, reason)

    def observe(self, message: SignedMessage[Any], number: int) -> list[Proof]:
        """Return the proofs that a message completes; `number` is that of the open round."""
        found = (self._observe(entry, number) for entry in _statements_in(message))
        return [proof for proof in found if proof is not None]

    def compare(self, ours: Iterable[SignedMessage[Commit]], theirs: Iterable[SignedMessage[Commit]]) -> list[Proof]:
        """Return the proofs in two chains: the keys that signed one statement for ours and another one for theirs."""
        known = {(entry.sender, place_of(entry)): entry for commit in ours for entry in _statements_in(commit)}
        found = []
        for entry in (entry for commit in theirs for entry in _statements_in(commit)):
            first = known.get((entry.sender, place_of(entry)), entry)
            is_judged = entry.sender == self._me or self.is_excluded(entry.sender)
            if first.digest != entry.digest and not is_judged and (proof := self._prove(first, entry)) is not None:
                found.append(proof)
        return found

    def _observe(self, message: SignedMessage[Any], number: int) -> Proof | None:
        place = place_of(message)
        if place is None or not number - KEPT_ROUNDS <= message.body.round <= number + 1:
            return None
        if message.sender == self._me or self.is_excluded(message.sender):
            return None
        known = self._statements.setdefault(message.sender, RecentTable(MAX_STATEMENTS_PER_PEER))
        first = known.setdefault(place, message)
        if first is message or first.digest == message.digest:
            return None
        return self._prove(first, message)

    def _prove(self, first: SignedMessage[Any], second: SignedMessage[Any]) -> Proof | None:
        body = Proof(*sorted((first, second), key=lambda entry: entry.digest))
        if not body.is_valid or len(self.excluded) >= MAX_EXCLUDED:
            return None
        self.found[body.culprit] = body
        self._statements.pop(body.culprit, None)
        return body

    def is_small(self, proof: Proof) -> bool:
        """Return whether a proof is small enough to be passed on; a larger one counts for this peer alone."""
        return proof.to_wire().ByteSize() <= MAX_PROOF_BYTES

    def learn(self, proof: SignedMessage[Proof]) -> bool:
        """Take over a verified proof; return whether it is news."""
        culprit = proof.body.culprit
        if culprit in self.proofs or culprit == self._me or len(self.excluded) >= MAX_EXCLUDED:
            return False
        is_news = culprit not in self.found
        self.proofs[culprit] = proof
        self._statements.pop(culprit, None)
        return is_news

    def forget(self, number: int) -> None:
        """Forget the statements of rounds long before this one."""
        for peer, known in list(self._statements.items()):
            for place in [place for place, entry in known.items() if entry.body.round < number - KEPT_ROUNDS]:
                del known[place]
            if not known:
                del self._statements[peer]

    def close_round(self, seen: RoundConduct) -> None:
        """Turn what this peer saw in a round into strikes, and take strikes of peers that did well back."""
        for peer in seen.withheld:
            self.strike(peer, seen.round)
        self.serving.forgive(seen.served - seen.withheld)
        for peer, reason in seen.failed_leaders.items():
            if peer != self._me:
                self.leading.strike(peer, seen.round, reason)
        self._note_wrong_sums(seen)
        self._note_left_out(seen)
        self.forget(seen.round)

    def _note_wrong_sums(self, seen: RoundConduct) -> None:
        """Exclude reducers that lied, unless so many of them disagree with this peer that the fault may be its own."""
        guilty = seen.false_reducers | self.wrong_sums.keys()
        if len(guilty) <= (seen.members - 1) // 3:
            self.wrong_sums |= dict.fromkeys(seen.false_reducers - self.wrong_sums.keys(), seen.round)
        for peer in seen.false_reducers:
            self.serving.strike(peer, seen.round, "it announced a wrong sum")

    def _note_left_out(self, seen: RoundConduct) -> None:
        leader = seen.leader
        if leader == self._me:
            return
        if len(self._led) >= MAX_LEADERS and leader not in self._led:
            self._led.clear()
            self._left_out.clear()
        self._led[leader] += 1
        for peer in seen.left_out:
            self._left_out[leader, peer] += 1
        worst = max((self._left_out[leader, peer] for peer in seen.left_out), default=0)
        if worst >= LEFT_OUT_STRIKE and 2 * worst > self._led[leader]:
            self.leading.strike(leader, seen.round, "it leaves out work that is ready")
        elif leader not in seen.failed_leaders and not seen.left_out:
            self.leading.forgive([leader])

    def left_out_by(self) -> dict[PeerId, tuple[int, int]]:
        """Return how often each leader left our ready work out, and in how many rounds that it led."""
        mine = [(leader, count) for (leader, peer), count in self._left_out.items() if peer == self._me]
        return {leader: (count, self._led[leader]) for leader, count in mine}

    def describe(self, number: int, live: Collection[PeerId]) -> list[str]:
        """Return the conduct of others in plain words, a line each; `number` is the next round."""
        proved = {**{peer: proof.body for peer, proof in self.proofs.items()}, **self.found}
        lines = [f"excluded: {peer} signed {proof.describe()}" for peer, proof in sorted(proved.items())]
        lines += [f"excluded: {peer} made up a sum in round {at + 1}" for peer, at in sorted(self.wrong_sums.items())]
        for strikes, effect in ((self.serving, "nobody waits for"), (self.leading, "does not lead:")):
            for peer, reason in sorted(strikes.struck(number, live).items()):
                lines.append(f"{effect} {peer} until round {strikes.until(peer) + 1}: {reason}")
        lines += [
            f"left out by {leader} {count} times of {led}"
            for leader, (count, led) in sorted(self.left_out_by().items())
        ]
        return lines

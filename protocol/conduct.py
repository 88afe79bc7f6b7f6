"""Remember the misdeeds of other peers: proofs, which exclude a key, and strikes, which pass.

A proof is two statements that one key signed although each excludes the other. An honest peer signs at most one
statement for each of these places, also over restarts, because its vote and its contribution are on disk before anybody
sees them:

    contribution   one in a round that continues the same chain
    roster         one in a view
    commit         one in a view
    part           one sum of the same inputs
    justification  one in a view, and its promises allow the commit that it is for (`consensus/locks.py`)

Anybody can check a proof with the signatures alone, so a peer needs to trust nobody who passes one on. A node that runs
with a copied key would be guilty as well, because nobody can tell it from a liar: so one whose folder was copied stays
quiet first (`node.loop.round_loop.SecondLife`). Two acknowledgements of one view are no proof,
because two leaders may lead a view, and a member may follow the stronger one after the other.

A conviction by audits rests on the findings of two thirds of the voters (`protocol.audit_tracker`). They are kept with
it, so that a restarted peer still excludes the key, and can show why.

A strike is for a misdeed without a proof, such as a contribution that nobody could fetch; strikes are local. Each one
doubles the number of rounds for which a peer is set aside, up to a limit; good rounds halve it again. So an honest peer
whose link was broken is back soon after it is repaired.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import Commit, ContributionLimits, Roster
from protocol.consensus.messages.signed import OpenNested, SignedMessage
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.recent import RecentTable

PROOF_KIND = "proof"
MAX_PROOF_BYTES = 512 * 1024
Place = tuple[str | int | bytes, ...]
MAX_LEVEL = 6  # 64 rounds
GOOD_ROUNDS = 4  # that take one strike back
MAX_PEERS = 1024
MAX_STATEMENTS_PER_PEER = 64
MAX_EXCLUDED = 1024
MAX_LEADERS = 1024
LEFT_OUT_STRIKE = 3  # times that a leader leaves the same ready peer out, more than it includes it
KEPT_ROUNDS = 2
NOT_SERVED = "its contribution or sum could not be fetched"
FALSE_STATEMENT = "it signed a false or malformed statement"


def place_of(message: SignedMessage[Any]) -> Place | None:
    """Return the place for which a peer signs one statement only; none if it may sign several."""
    kind, body = message.signed.kind, message.body
    match kind:
        case "contribution":
            return kind, body.round, body.base
        case "roster" | "commit" | "justification":
            return kind, body.round, body.base, body.view
        case "part":
            return kind, body.round, body.part, body.inputs
    return None


def _value_of(message: SignedMessage[Any]) -> object:
    """Return the part of a statement that must be the same in all statements for one place."""
    return message.body.blob if message.signed.kind == "part" else message.digest


def excludes(first: SignedMessage[Any], second: SignedMessage[Any]) -> bool:
    """Return whether one peer signed both statements although each excludes the other."""
    place = place_of(first)
    if first.sender != second.sender or place is None:
        return False
    if place == place_of(second):
        return _value_of(first) != _value_of(second)
    return forgets_decision(first, second) or forgets_decision(second, first)


def forgets_decision(justification: SignedMessage[Any], commit: SignedMessage[Any]) -> bool:
    """Return whether the promises that a leader shows for its commit require another content."""
    if _counterpart(place_of(justification)) != place_of(commit) or commit.signed.kind != "commit":
        return False
    is_for_it = justification.body.proposal == commit.digest
    return is_for_it and not justification.body.allows(commit.body.content_digest)


def _counterpart(place: Place | None) -> Place | None:
    """Return the place of the commit that a justification is for, and the other way round."""
    kinds = {"commit": "justification", "justification": "commit"}
    return None if place is None or place[0] not in kinds else (kinds[str(place[0])], *place[1:])


@dataclass(frozen=True)
class Proof:
    """Two statements that exclude each other; the message around them is signed by a peer that found them."""

    first: SignedMessage[Any]
    second: SignedMessage[Any]

    @property
    def round(self) -> int:
        """Return the round of the misdeed."""
        return int(self.first.body.round)

    @property
    def culprit(self) -> PeerId:
        """Return the key that signed both."""
        return self.first.sender

    @property
    def is_valid(self) -> bool:
        """Return whether the statements exclude each other."""
        return excludes(self.first, self.second)

    def describe(self) -> str:
        """Return the misdeed in plain words."""
        if self.first.signed.kind != self.second.signed.kind:
            return f"a commit that forgets what may be decided in round {self.round + 1}"
        name = {"part": "sums of one part"}.get(self.first.signed.kind, f"{self.first.signed.kind}s")
        return f"two different {name} in round {self.round + 1}"

    def to_wire(self) -> wire.Proof:
        return wire.Proof(statements=[self.first.signed, self.second.signed])

    @classmethod
    def from_wire(cls, body: wire.Proof, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        if len(body.statements) != 2 or any(signed.kind == PROOF_KIND for signed in body.statements):
            raise MalformedError("a proof that does not consist of two statements")
        first, second = (open_nested(signed) for signed in body.statements)
        proof = cls(first, second)
        if not proof.is_valid:
            raise MalformedError("a proof whose statements do not exclude each other")
        return proof


@dataclass(frozen=True)
class PeerConvicted:
    """Two thirds of the voters contradict a peer: its contribution of `round`, or its finding on one.

    `findings`, `voters` and the audited peer's signed `contribution` are the proof.
    """

    peer: PeerId
    offence: str
    round: int
    findings: tuple[wire.Signed, ...]
    voters: frozenset[PeerId]
    contribution: wire.Signed

    def describe(self) -> str:
        """Return the misdeed in plain words."""
        what = "its work" if self.offence == "audit: lied" else "its finding on the work of another"
        return f"two thirds of the voters contradict {what} in round {self.round + 1}"


@dataclass
class Suspension:
    """How often a peer misbehaved lately, and until when it is set aside; times are in the unit of the caller.

    The caller suspends it, longer with each level; good deeds take levels back.
    """

    level: int = 0
    until: float = 0
    good: int = 0  # deeds since the level last changed

    def raise_level(self, now: float, most: float = math.inf) -> bool:
        """Count a misdeed and return True, unless the peer is set aside: then further ones do not count."""
        if now < self.until:
            return False
        self.level, self.good = int(min(self.level + 1, most)), 0
        return True

    def suspend_rounds(self, number: int) -> None:
        """Set the peer aside for 2^level rounds after round `number`."""
        self.until = number + 1 + 2**self.level

    def count_good(self, needed: int) -> bool:
        """Count a good deed, `needed` of which lower the level; return whether nothing is left of the misdeeds."""
        self.good += 1
        if self.good >= needed:
            self.level, self.good = self.level - 1, 0
        return self.level <= 0


@dataclass
class _StrikeRecord(Suspension):
    reason: str = ""


class Strikes:
    """The strikes of all peers for one kind of duty; times are numbers of rounds."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _StrikeRecord] = {}

    def strike(self, peer: PeerId, number: int, reason: str) -> None:
        """Record a misdeed in a round; while a peer is set aside, further ones do not count."""
        if peer not in self._records and len(self._records) >= MAX_PEERS:
            del self._records[min(self._records, key=lambda known: self._records[known].level)]
        record = self._records.setdefault(peer, _StrikeRecord())
        if record.raise_level(number, MAX_LEVEL):
            record.suspend_rounds(number)
            record.reason = reason

    def forgive(self, peers: Iterable[PeerId]) -> None:
        """Record a good round of these peers, which also ends the time for which they are set aside."""
        for peer in self._records.keys() & set(peers):
            self._records[peer].until = 0
            if self._records[peer].count_good(GOOD_ROUNDS):
                del self._records[peer]

    def struck(self, number: int, live: Collection[PeerId]) -> dict[PeerId, str]:
        """Return the peers that are set aside in a round, with the reason: at most a third of those that are alive.

        If more seem to fail, the fault may be with this peer.
        """
        aside = [peer for peer in live if peer in self._records and number < self._records[peer].until]
        aside.sort(key=lambda peer: (-self._records[peer].level, peer))
        return {peer: self._records[peer].reason for peer in aside[: (len(live) - 1) // 3]}

    def until(self, peer: PeerId) -> int:
        """Return the round from which a peer counts again."""
        record = self._records.get(peer)
        return int(record.until) if record else 0


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

    def __init__(
        self, me: PeerId, proofs: Iterable[SignedMessage[Proof]] = (), convictions: Iterable[PeerConvicted] = ()
    ) -> None:
        self._me = me
        self._statements: dict[PeerId, RecentTable[Place, SignedMessage[Any]]] = {}
        self.proofs: dict[PeerId, SignedMessage[Proof]] = {proof.body.culprit: proof for proof in proofs}
        self.found: dict[PeerId, Proof] = {}  # those that this peer found itself
        self.wrong_sums: dict[PeerId, int] = {}  # the round in which this peer computed another sum
        self.convictions: dict[PeerId, PeerConvicted] = {each.peer: each for each in convictions if each.peer != me}
        self.serving = Strikes()
        self.leading = Strikes()
        self._led: Counter[PeerId] = Counter()
        self._left_out: Counter[tuple[PeerId, PeerId]] = Counter()  # leader, contributor

    @property
    def excluded(self) -> frozenset[PeerId]:
        """Return the keys whose misdeeds are proved."""
        return frozenset({*self.proofs, *self.found, *self.wrong_sums, *self.convictions})

    @property
    def doubted(self) -> frozenset[PeerId]:
        """Return the excluded keys of which this peer can convince nobody: by its own sums, or by a proof too large."""
        return frozenset({*self.found, *self.wrong_sums} - self.proofs.keys() - self.convictions.keys())

    def is_excluded(self, peer: PeerId) -> bool:
        """Return whether the misdeeds of a key are proved."""
        return any(peer in keys for keys in (self.proofs, self.found, self.wrong_sums, self.convictions))

    def convict(self, conviction: PeerConvicted) -> bool:
        """Exclude a peer whose work or finding two thirds of the voters contradict; return whether that is news."""
        peer = conviction.peer
        if peer == self._me or peer in self.convictions or len(self.excluded) >= MAX_EXCLUDED:
            return False
        self.convictions[peer] = conviction
        return True

    def accuse(self, peer: PeerId, number: int) -> None:
        """Strike a peer that signed a statement about a round that no honest peer signs; it cannot be passed on."""
        if peer != self._me:
            self.serving.strike(peer, number, FALSE_STATEMENT)
            self.leading.strike(peer, number, FALSE_STATEMENT)

    def strike(self, peer: PeerId, number: int, reason: str = NOT_SERVED) -> None:
        """Strike a peer that does not serve what it announced in a round, or fails as an auditor or under audits."""
        if peer != self._me:
            self.serving.strike(peer, number, reason)

    def clear(self, peer: PeerId) -> None:
        """Let a peer count again that a strike set aside wrongly."""
        self.serving.forgive([peer])

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
        if first.digest != message.digest:
            return self._prove(first, message)
        other = known.get(counterpart) if (counterpart := _counterpart(place)) is not None else None
        return None if other is None else self._prove(other, message)

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
        lines += [f"excluded: {peer}: {each.describe()}" for peer, each in sorted(self.convictions.items())]
        lines += [f"excluded: {peer} made up a sum in round {at + 1}" for peer, at in sorted(self.wrong_sums.items())]
        for strikes, effect in ((self.serving, "nobody waits for"), (self.leading, "does not lead:")):
            for peer, reason in sorted(strikes.struck(number, live).items()):
                lines.append(f"{effect} {peer} until round {strikes.until(peer) + 1}: {reason}")
        lines += [
            f"left out by {leader} {count} times of {led}"
            for leader, (count, led) in sorted(self.left_out_by().items())
        ]
        return lines

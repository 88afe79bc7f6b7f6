"""The choice between our chain and one that another peer shows. PURE.

Only certificates count, from the last common commit on. A commit is certified

    strongly, if a quorum of all voters of the electorate before it acknowledged it;
    weakly,   if more than a third of them did, so that one honest voter checked it, or more than half of those that we
              see: then the others are gone, or come back like us. If we alone had a vote, those that contributed lately
              count, because they decide while their only voter is away.

A chain that goes on from our head is followed if each further commit is certified. Between two chains, the one whose
weakest commit has more of the votes that counted at the fork wins; then the one with more tokens; then the one with the
lower digest. Peers that come back from several sides of a split, none of which had a third of the voters, meet by the
same rule: a branch without enough votes is refused only by peers that have a better one.

If the two chains share no commit that is kept, and a minority has carried ours since its last head that was certified
strongly, the electorate of that head decides: the other chain needs the acknowledgements of more of these voters than
may lie, and wins by their number, then by tokens and digest, however long both are. In all other cases somebody has to
vouch for the other chain: the voters that we know, a trust point, or the contacts that the user named. Before the first
commit nobody has a vote; then the word of the contacts alone decides, or, without a contact, the certificates, the
first by more than half of the peers that we see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.consensus.chain import (
    CertifiedCommit,
    Chain,
    ChainHead,
    ChainLog,
    count_weakest,
    counted_signers,
    extend_head,
)
from protocol.consensus.messages.signed import Digest
from protocol.electorate import ABSENCES_TO_LOSE, Electorate
from protocol.errors import MalformedError, StaleError
from protocol.identity import PeerId
from protocol.signing import TrustPoint

FOUNDING_ROUNDS = 4  # a younger chain without a voter in common with another one counts all votes
MAX_LOST_ROUNDS = 64  # of our chain, without a person
Relation = Literal["ahead", "behind", "other", "refused"]


@dataclass(frozen=True)
class LocalEvidence:
    """The peers and points by which a chain is judged.

    Args:
        peer_id: our own id.
        live: the other trainers that are alive, or vanished a moment ago.
        trust: the trust point of this run, if there is one.
        requires_trust: whether a chain whose kept commits begin after the trust point is refused. A host keeps a state
            only now and then, so its point may be older; then the other rules decide.
        word: whether most contacts that answer are on the offered chain; None if there is none to ask.
    """

    peer_id: PeerId
    live: frozenset[PeerId]
    trust: TrustPoint | None = None
    word: bool | None = None
    requires_trust: bool = True


class ChainOffer:
    """A chain as another peer shows it; the signatures in its log are checked.

    `heads` has the head before each commit of the log, and the one after the last. `head` is the last of them, `state`
    the digest of the outer state there, which is only a claim, and empty where peers share none.

    Raises MalformedError unless the commits follow one another and the certificates name one history.
    """

    def __init__(self, log: ChainLog, claimed: ChainHead, state: Digest = b"") -> None:
        self.log = log
        self.heads = _heads_of(log, claimed)
        self.state = state

    @property
    def head(self) -> ChainHead:
        return self.heads[-1]

    @property
    def electorate(self) -> Electorate:
        """Return the electorate after the last commit."""
        return self.log.electorates[-1]

    def state_at(self, head: ChainHead) -> Digest:
        """Return the state that the chain names at one of its heads; empty if it names none there."""
        return dict(zip((each.digest for each in self.heads), self._states, strict=True)).get(head.digest, b"")

    @property
    def _states(self) -> list[Digest]:
        return [*(entry.certificate.basis.state for entry in self.log.commits), self.state]

    def is_passed_by(self, trust: TrustPoint) -> bool:
        """Return whether the chain passes through a trust point."""
        along = zip(self.heads, self._states, self.log.electorates, strict=True)
        points = (TrustPoint.of(head.round, head.digest, state, voters.digest) for head, state, voters in along)
        return any(point == trust for point in points)


def _heads_of(log: ChainLog, claimed: ChainHead) -> tuple[ChainHead, ...]:
    if not log.commits:
        return (claimed,)
    first = log.commits[0]
    heads = [ChainHead(first.body.round, first.body.base, first.certificate.basis.tokens)]
    for entry, electorate in zip(log.commits, log.electorates, strict=False):
        basis, head = entry.certificate.basis, heads[-1]
        if (basis.voters, basis.tokens) != (electorate.digest, head.tokens):
            raise MalformedError(f"the certificate of round {head.round} names another history than its chain")
        try:
            heads.append(extend_head(head, entry.body))
        except StaleError as fault:
            raise MalformedError(f"the commits do not follow one another: {fault}") from fault
    if heads[-1].round == claimed.round and heads[-1].digest != claimed.digest:
        raise MalformedError(f"the commits do not lead to the head of round {claimed.round}")
    return tuple(heads)


@dataclass(frozen=True)
class ChainComparison:
    """The relation of another chain to ours.

    "ahead": follow it; "behind": it is part of ours; "other": ours is preferred; "refused": it is not certified.

    Args:
        relation: see above.
        reason: a sentence about a refusal.
        common: the last head that both chains have; None if it is not kept.
        lost: how many rounds of ours it does not have, at least.
        is_backed: whether voters decided that chain, and no more of them ours, so that nobody has to be asked.
        is_split: whether peers carry each of the chains, although no head in common is kept.
    """

    relation: Relation
    reason: str = ""
    common: ChainHead | None = None
    lost: int = 0
    is_backed: bool = False
    is_split: bool = False

    @property
    def needs_person(self) -> bool:
        """Return whether so much of our chain would be lost that a person has to decide."""
        return self.relation == "ahead" and self.lost > MAX_LOST_ROUNDS and not self.is_backed


def judge(own: Chain, offer: ChainOffer, evidence: LocalEvidence) -> ChainComparison:
    """Return the relation of an offered chain to ours."""
    trust = evidence.trust
    is_too_old = trust is not None and offer.heads[0].round > trust.round and not evidence.requires_trust
    if trust is not None and own.round < trust.round and not is_too_old and not offer.is_passed_by(trust):
        return ChainComparison("refused", _describe_missed(trust, offer))
    place = _last_common(own, offer)
    if place is None:
        return _judge_unconnected(own, offer, evidence)
    common, theirs = offer.heads[place], offer.log.commits[place:]
    if own.electorate_at(common.digest).digest != offer.log.electorates[place].digest:
        return ChainComparison("refused", f"it names other voters after round {common.round} than our chain", common)
    ours = own.commits_since(common.round) or ()
    if not theirs:
        return ChainComparison("behind", common=common)
    fault = _find_fault(offer, place, evidence)
    if not ours:
        return ChainComparison("refused", fault, common) if fault else ChainComparison("ahead", common=common)
    voters = _votes_at_fork(own, common, ours, theirs)
    logs = ChainLog(own.electorate_at(common.digest), tuple(ours)), offer.log.since(common.round)
    weakest = count_weakest(logs[0], voters), count_weakest(logs[1], voters)
    if fault and weakest[1] < weakest[0]:
        return ChainComparison("refused", fault, common)
    if _rank(weakest[1], offer.head) > _rank(weakest[0], own.head):
        return ChainComparison("ahead", common=common, lost=len(ours))
    return ChainComparison("other", common=common)


def _rank(weakest: int, head: ChainHead) -> tuple[int, int, int]:
    return weakest, head.tokens, -int.from_bytes(head.digest, "big")


def _last_common(own: Chain, offer: ChainOffer) -> int | None:
    """Return the index of the last head of the offer that our chain keeps."""
    known = [index for index, head in enumerate(offer.heads) if own.has_head(head.digest)]
    return known[-1] if known else None


def _find_fault(offer: ChainOffer, first: int, evidence: LocalEvidence) -> str:
    """Return why not to follow the commits of an offer from the index `first` on; empty if there is no reason.

    A trust point vouches for all commits before it. A newcomer knows the voters from the offered chain alone: so the
    word of its contacts decides, also about a commit that few voters acknowledged because the others had died, and
    whose voters have died since.
    """
    commits, electorates, trust = offer.log.commits, offer.log.electorates, evidence.trust
    if trust is not None and offer.is_passed_by(trust):
        first = max(first, trust.round - offer.heads[0].round)
    elif not electorates[first].voters and evidence.word is not None:
        return "" if evidence.word else "most of our contacts are on another chain"
    return _uncertified(commits[first:], electorates[first:], evidence)


def _uncertified(commits: Sequence[CertifiedCommit], electorates: Sequence[Electorate], evidence: LocalEvidence) -> str:
    """Return the fault of the first commit that is not certified; empty if all are."""
    for entry, electorate in zip(commits, electorates, strict=False):
        if not is_certified(entry, electorate, evidence):
            count, voters = len(entry.signers & electorate.voters), len(electorate.voters)
            return f"round {entry.body.round} is not certified: {count} of {voters} voters acknowledged it"
    return ""


def is_certified(
    entry: CertifiedCommit, before: Electorate, evidence: LocalEvidence, known: Electorate | None = None
) -> bool:
    """Return whether the certificate of a commit certifies it, strongly or weakly.

    Args:
        entry: the commit.
        before: the electorate of its round.
        evidence: the own knowledge of this peer.
        known: the electorate to judge by, if it is another one.
    """
    signers, electorate = counted_signers(entry, before), known or before
    if electorate.is_certified_by(signers) or 3 * len(signers & electorate.voters) > len(electorate.voters) > 0:
        return True
    if not electorate.voters and evidence.word is not None:
        return evidence.word
    seen = electorate.voters & evidence.live
    if not seen and evidence.peer_id not in electorate.voters:
        seen = evidence.live
    elif electorate.voters == {evidence.peer_id}:  # the others went on without their only voter (`counted`)
        seen = electorate.counted(evidence.live, evidence.live)
    return 2 * len(signers & seen) > len(seen)


def _votes_at_fork(
    own: Chain, common: ChainHead, ours: Sequence[CertifiedCommit], theirs: Sequence[CertifiedCommit]
) -> frozenset[PeerId]:
    """Return the keys whose votes count between two branches.

    Before the first commit nobody has a vote: then the founders of our chain count, once it is older than
    FOUNDING_ROUNDS, because anybody can make keys and found another one.
    """
    voters = own.electorate_at(common.digest).voters
    if voters:
        return voters
    if len(ours) > FOUNDING_ROUNDS:
        return own.electorate_at(ours[0].body.base).after(ours[0].body).voters
    return frozenset().union(*(entry.signers for entry in (*ours, *theirs)))


def _describe_missed(trust: TrustPoint, offer: ChainOffer) -> str:
    if offer.heads[0].round > trust.round:
        return f"the trust point of round {trust.round} is older than the commits that peers keep; get a newer one"
    return f"its chain does not pass through the trust point of round {trust.round}"


def _judge_unconnected(own: Chain, offer: ChainOffer, evidence: LocalEvidence) -> ChainComparison:
    """Judge a chain that shares no kept commit with ours: we were away for long, are new, or the fork is old."""
    first, is_split = offer.heads[0], _is_split(own, offer)
    if is_split and own.is_weak and (judgement := _judge_by_former_voters(own, offer)):
        return judgement
    if offer.head.round < own.round:
        return ChainComparison("other", is_split=is_split)
    if not _is_vouched(own.electorate, offer, evidence):
        reason = f"nobody that we know vouches for its chain from round {first.round} on"
        return ChainComparison("refused", reason, is_split=is_split)
    return ChainComparison("ahead", lost=MAX_LOST_ROUNDS + 1 if own.round and first.round <= own.round else 0)


def _is_split(own: Chain, offer: ChainOffer) -> bool:
    """Return whether a chain goes on without the peers that carry ours.

    A chain that ends before the commits that we keep may be the beginning of ours, as that of a peer that comes back.
    The voters of ours took part in one of its last commits then, because they would have lost their votes otherwise.
    """
    recent = offer.log.commits[-ABSENCES_TO_LOSE:]
    if len(recent) < ABSENCES_TO_LOSE or not (ours := own.log.commits):
        return False
    return all(ours[-1].signers.isdisjoint(entry.signers | entry.body.by_sender.keys()) for entry in recent)


def _judge_by_former_voters(own: Chain, offer: ChainOffer) -> ChainComparison | None:
    """Judge by the voters of our last head that was certified strongly; None if those of the other chain may all lie.

    Both sides of a split remember the same voters, so that only one of the chains outranks the other. Newest commits
    count, because a quorum of these voters carries one chain at a time, and none from before that head.
    """
    strong = own.strong_electorate
    newest = [counted_signers(log.commits[-1], log.electorates[-2]) for log in (own.log, offer.log)]
    ours, theirs = (len(signers & strong.voters) for signers in newest)
    if offer.head.round <= strong.round or theirs <= strong.tolerated_liars(len(strong.voters)):
        return None
    if _rank(theirs, offer.head) > _rank(ours, own.head):
        return ChainComparison("ahead", lost=own.round - strong.round, is_backed=True)
    return ChainComparison("other", is_split=True)


def _is_vouched(known: Electorate, offer: ChainOffer, evidence: LocalEvidence) -> bool:
    """Return whether the newest commit of a chain, which names all before it, is vouched for."""
    commits, trust = offer.log.commits, evidence.trust
    if trust is not None and offer.is_passed_by(trust):
        return not _find_fault(offer, 0, evidence)
    if not known.voters or known.voters.isdisjoint(evidence.live) or not commits:
        return bool(evidence.word)
    return is_certified(commits[-1], offer.log.electorates[-2], evidence, known)

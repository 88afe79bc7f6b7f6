"""The choice between our chain and one that another peer shows: only certificates count, whatever records claim."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead, ChainLog, build_certificate
from protocol.consensus.fork_choice import FOUNDING_ROUNDS, MAX_LOST_ROUNDS, ChainOffer, LocalEvidence, judge
from protocol.electorate import Electorate
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import AdmissionSection
from protocol.signing import TrustPoint
from tests.node.small_run import PEERS, RUN_ID, certified, commit_of

NAMES = [peer.peer_id for peer in PEERS]
VOTERS = (0, 1, 2, 3)  # found the run with their contributions to its first commit
LIARS = (4, 5)
STATE = b"s" * 32


def grow(chain: Chain, rounds: int, signers: Collection[int], word: str = "", given: Collection[int] = ()) -> Chain:
    """Return a longer chain, whose commits have contributions of `given`, by default of all signers."""
    longer = Chain(chain.head, chain.log)
    for _ in range(rounds):
        blobs = {peer: Blob.of(f"{word}{longer.round} {peer}".encode()) for peer in given or signers}
        longer.append(certified(longer, commit_of(longer.head, blobs), STATE, signers))
    return longer


def founded(rounds: int = 10) -> Chain:
    return grow(Chain.from_genesis(RUN_ID), rounds, VOTERS)


def offer(chain: Chain, last: int = 64, state: bytes = STATE) -> ChainOffer:
    log = chain.log_since(max(0, chain.round - last)) or chain.log
    return ChainOffer(log, chain.head, state)


def seen(*numbers: int, me: int = 0, word: bool | None = None, trust: TrustPoint | None = None) -> LocalEvidence:
    return LocalEvidence(NAMES[me], frozenset(NAMES[number] for number in numbers if number != me), trust, word)


ALL = seen(1, 2, 3, *LIARS)


def test_chain_that_goes_on_from_ours_is_followed() -> None:
    ours = founded()
    assert judge(ours, offer(grow(ours, 2, VOTERS)), ALL).relation == "ahead"
    assert judge(ours, offer(grow(ours, 2, VOTERS[1:])), ALL).relation == "ahead", "three of four are a quorum"
    assert judge(grow(ours, 2, VOTERS), offer(ours), ALL).relation == "behind"


def test_commits_that_no_voter_acknowledged_are_refused() -> None:
    """Attack 1d. Control: with the voters' acknowledgements the same commits are followed."""
    ours = founded()
    for signers in ((4,), LIARS, (1, *LIARS)):
        judgement = judge(ours, offer(grow(ours, 3, signers, given=[4])), ALL)
        assert judgement.relation == "refused" and "not certified" in judgement.reason
    assert judge(ours, offer(grow(ours, 3, VOTERS, given=[4])), ALL).relation == "ahead"


def test_number_of_live_keys_without_a_vote_does_not_matter() -> None:
    ours = founded()
    assert judge(ours, offer(grow(ours, 1, (1, *LIARS))), seen(1, 2, 3, *LIARS)).relation == "refused"


def test_invented_history_is_refused_whatever_it_claims() -> None:
    """Attack 1. Control: a peer that knows no voters can only follow the peers that it sees."""
    ours, theirs = founded(), grow(Chain.from_genesis(RUN_ID), 40, LIARS, "invented")
    assert theirs.tokens > ours.tokens
    assert judge(ours, offer(theirs), ALL).relation == "refused", "the fork is at the genesis: our founders count"
    assert judge(ours, offer(theirs, last=20), ALL).relation == "refused", "it shares nothing with our chain"
    claimed = ChainHead(1000, bytes(32), 2**59)
    for word in (None, False):
        alone = ChainOffer(ChainLog(Electorate.at_genesis()), claimed, STATE)
        assert judge(ours, alone, seen(1, 2, 3, 4, word=word)).relation == "refused", "and without any commit"
    newcomer = Chain.from_genesis(RUN_ID)
    assert judge(newcomer, offer(theirs), seen(*LIARS)).relation == "ahead"


def test_branch_with_more_votes_wins_and_then_the_one_with_more_tokens() -> None:
    fork = founded()
    many, few = grow(fork, 2, (0, 1, 2), "many"), grow(fork, 5, (2, 3), "few")
    assert few.tokens > many.tokens
    assert judge(few, offer(many), ALL).relation == "ahead", "by votes, in spite of fewer tokens"
    assert judge(many, offer(few), ALL).relation in ("other", "refused")
    short, long = grow(fork, 2, (0, 1), "short"), grow(fork, 3, (2, 3), "long")
    assert judge(short, offer(long), ALL).relation == "ahead" and judge(long, offer(short), ALL).relation == "other"
    one, two = grow(fork, 2, (0, 1), "one"), grow(fork, 2, (2, 3), "two")
    lower, higher = sorted((one, two), key=lambda chain: chain.digest)
    assert judge(higher, offer(lower), ALL).relation == "ahead" and judge(lower, offer(higher), ALL).relation == "other"


def test_peers_that_come_back_follow_those_that_went_on() -> None:
    ours = founded()
    assert judge(ours, offer(grow(ours, 5, (1,))), seen(1)).relation == "ahead", "more than half of those that we see"
    assert judge(ours, offer(grow(ours, 5, (1, 2))), seen(1, 2, 3)).relation == "ahead", "more than a third checked it"
    assert judge(ours, offer(grow(ours, 5, (1,))), seen(1, 2, 3)).relation == "refused"


def test_only_voter_follows_those_that_went_on_without_it() -> None:
    """A first commit of one contributor founds an electorate of one; when that one dies, the others go on.

    Control: keys that never contributed do not count while one that did is alive.
    """
    ours = grow(Chain.from_genesis(RUN_ID), 1, (0, 1), given=[0])
    ours = grow(ours, 3, (0, 1))
    assert ours.electorate.voters == {NAMES[0]} and NAMES[1] in ours.electorate.attendance
    assert judge(ours, offer(grow(ours, 5, (1,))), seen(1)).relation == "ahead"
    assert judge(ours, offer(grow(ours, 5, (1,))), seen(1, *LIARS)).relation == "ahead"
    assert judge(ours, offer(grow(ours, 5, LIARS)), seen(1, *LIARS)).relation == "refused"


def test_branches_of_single_peers_meet() -> None:
    """Neither has the votes of a third; one that refused the other would stay alone for ever."""
    fork = founded()
    ours, theirs = grow(fork, 2, (0,), "mine"), grow(fork, 3, (1,), "theirs")
    assert judge(ours, offer(theirs), seen(1, 2, 3)).relation == "ahead"


def test_young_chains_of_different_founders_meet_and_old_ones_do_not() -> None:
    for rounds, relation in ((FOUNDING_ROUNDS, "ahead"), (FOUNDING_ROUNDS + 1, "other")):
        ours = grow(Chain.from_genesis(RUN_ID), rounds, (0, 1), "ours")
        theirs = grow(Chain.from_genesis(RUN_ID), rounds + 1, (2, 3, 4), "theirs")
        assert judge(ours, offer(theirs), seen(1, 2, 3, 4)).relation == relation


def test_after_a_long_absence_known_voters_or_contacts_vouch() -> None:
    ours, theirs = founded(2), founded(2)
    theirs = grow(theirs, 80, VOTERS[1:])
    assert not ours.has_head(offer(theirs).heads[0].digest)
    assert judge(ours, offer(theirs), seen(1, 2, 3)).relation == "ahead"
    false = grow(Chain.from_genesis(RUN_ID), 82, LIARS)
    for word in (None, True, False):
        assert judge(ours, offer(false), seen(1, 2, 3, *LIARS, word=word)).relation == "refused", "voters come first"
    assert judge(ours, offer(theirs), seen(4, word=True)).relation == "ahead", "no voter is left, a contact is"
    assert judge(ours, offer(theirs), seen(4)).relation == "refused"


def test_newcomer_follows_the_word_of_its_contacts() -> None:
    newcomer, chain = Chain.from_genesis(RUN_ID), founded(70)
    assert judge(newcomer, offer(chain), seen(1, 2, 3, me=5, word=True)).relation == "ahead"
    assert judge(newcomer, offer(chain), seen(1, 2, 3, me=5, word=False)).relation == "refused"
    listed = Chain.from_genesis(RUN_ID, AdmissionSection(mode="list", keys=tuple(NAMES[:4])))
    grown = grow(listed, 70, VOTERS)
    assert judge(listed, offer(grown), seen(1, 2, 3, me=5, word=False)).relation == "ahead", "the manifest names voters"


def test_newcomer_joins_a_run_whose_voters_have_died_since() -> None:
    """Control: without a contact, and for a peer that knew the voters, too few have acknowledged the chain."""
    fork = founded(3)
    survived = grow(fork, 20, (3,))
    for ours, word, relation in (
        (Chain.from_genesis(RUN_ID), True, "ahead"),
        (Chain.from_genesis(RUN_ID), False, "refused"),
        (Chain.from_genesis(RUN_ID), None, "refused"),
        (fork, True, "refused"),
    ):
        witnesses = seen(1, 4, me=5, word=word)
        assert judge(ours, offer(survived), witnesses).relation == relation, (ours.round, word)
    for number, relation in ((12, "ahead"), (2, "refused")):
        at = survived.log.commits[number]
        basis = at.certificate.basis
        trust = TrustPoint.of(number, at.body.base, basis.state, basis.voters)
        judged = judge(Chain.from_genesis(RUN_ID), offer(survived), seen(1, 4, me=5, trust=trust))
        assert judged.relation == relation, number


def test_trust_point_decides_for_a_newcomer() -> None:
    newcomer, chain = Chain.from_genesis(RUN_ID), founded(70)
    at = chain.log.commits[40]
    electorate, state = chain.electorate_at(at.body.base), at.certificate.basis.state
    trust = TrustPoint.of(at.body.round, at.body.base, state, electorate.digest)
    assert TrustPoint.parse(str(trust)) == trust
    assert judge(newcomer, offer(chain), seen(1, 2, 3, me=5, trust=trust, word=False)).relation == "ahead"
    false = grow(Chain.from_genesis(RUN_ID), 70, LIARS)
    for word in (None, True):
        assert judge(newcomer, offer(false), seen(*LIARS, me=5, trust=trust, word=word)).relation == "refused"
    head = TrustPoint.of(chain.round, chain.digest, STATE, chain.electorate.digest)
    assert judge(newcomer, offer(chain), seen(1, 2, 3, me=5, trust=head, word=False)).relation == "ahead"
    assert judge(newcomer, offer(chain, state=b"n" * 32), seen(1, 2, 3, me=5, trust=head)).relation == "refused"
    old = TrustPoint.of(1, bytes(32), b"", bytes(32))
    lenient = replace(seen(1, 2, 3, me=5, trust=old, word=True), requires_trust=False)
    assert judge(newcomer, offer(chain), lenient).relation == "ahead"
    assert "get a newer one" in judge(newcomer, offer(chain), seen(1, 2, 3, me=5, trust=old)).reason


@pytest.mark.parametrize("text", ["", "12", "12-abc", "-9f3c21aa5b0e77d41c09a3e2f6d4b810", "99999999-" + "a" * 32])
def test_malformed_trust_point_is_named(text: str) -> None:
    with pytest.raises(MalformedError, match="looks like"):
        TrustPoint.parse(text)


def test_jump_far_back_needs_a_person() -> None:
    fork = founded(2)
    ours = grow(fork, MAX_LOST_ROUNDS + 5, VOTERS[:3], "mine")
    theirs = grow(fork, MAX_LOST_ROUNDS + 6, VOTERS[1:], "theirs")
    judgement = judge(ours, offer(theirs), seen(1, 2, 3, word=True))
    assert judgement.relation == "ahead" and judgement.needs_person
    near = judge(grow(fork, 3, (0,), "mine"), offer(grow(fork, 3, VOTERS[1:], "theirs")), ALL)
    assert near.relation == "ahead" and not near.needs_person and near.lost == 3


def test_history_that_certificates_contradict_is_malformed() -> None:
    chain = founded(3)
    first, second, third = chain.log.commits
    richer = replace(third.certificate, basis=third.certificate.basis._replace(tokens=10**9))
    others = replace(third.certificate, basis=third.certificate.basis._replace(voters=bytes(32)))
    for commits in (
        (first, third),
        (first, second, replace(third, certificate=richer)),
        (first, second, replace(third, certificate=others)),
    ):
        with pytest.raises(MalformedError):
            ChainOffer(ChainLog(chain.log.electorate, commits), chain.head, STATE)
    with pytest.raises(MalformedError):
        ChainOffer(chain.log, replace(chain.head, digest=bytes(32)), STATE)


def test_kept_certificate_is_just_a_quorum() -> None:
    chain = founded(1)
    votes = chain.log.commits[0].certificate.by_sender

    def kept(*peers: PeerId) -> list[PeerId]:
        return sorted(build_certificate({peer: votes[peer] for peer in peers}, chain.electorate).signers)

    voters = sorted(NAMES[number] for number in VOTERS)
    assert kept(*voters) == voters[:3] and kept(*voters[1:]) == voters[1:] and kept(voters[3]) == voters[3:]

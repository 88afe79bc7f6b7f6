"""Trainers credit rollout peers, and commits bound what one lying trainer hands out."""

from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus.chain import genesis_head
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits
from protocol.consensus.messages.kinds import parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import LimitError, MalformedError, PeerFault
from protocol.identity import Identity
from protocol.rollout_credits import (
    MAX_CREDITS,
    Credits,
    RolloutCredit,
    add_credits,
    choose_credits,
    subtract_credits,
)
from protocol.signing import sign

RUN = "ab" * 32
SHAPES = bytes(32)
HEAD = genesis_head(RUN)
LIMITS = ContributionLimits("none", SHAPES, 1, 10_000, 100, credited_groups=200)
TRAINERS = sorted((Identity.create() for _ in range(4)), key=lambda each: each.peer_id)
FIRST, SECOND = sorted(Identity.create().peer_id for _ in range(2))


def contribution(tokens: int, *credited: RolloutCredit) -> Contribution:
    body = Contribution(HEAD.round, HEAD.digest, "none", SHAPES, tokens, 1, 1.0, (Blob.of(b"part"),))
    return replace(body, credits=credited)


def counted(*bodies: Contribution) -> dict[str, RolloutCredit]:
    """Return the sums of a commit with one contribution of each trainer."""
    messages = tuple(
        SignedMessage.of(sign(trainer, "contribution", RUN, body.to_wire()), body)
        for trainer, body in zip(TRAINERS, bodies, strict=False)
    )
    credited = Commit(HEAD.round, 0, HEAD.digest, messages, ()).counted_credits
    return {each.maker: each for each in add_credits(*credited.values())}


def test_honest_credits_count_in_full() -> None:
    honest = contribution(1000, RolloutCredit(FIRST, 20, 600), RolloutCredit(SECOND, 10, 400))
    assert counted(honest, honest, contribution(900)) == {
        FIRST: RolloutCredit(FIRST, 40, 1200),
        SECOND: RolloutCredit(SECOND, 20, 800),
    }


@pytest.mark.parametrize("honest_trainers", [1, 2, 3])
def test_one_lying_trainer_hands_out_at_most_two_parts_more_than_an_honest_one(honest_trainers: int) -> None:
    honest = contribution(1000, RolloutCredit(FIRST, 30, 1000))
    liar = contribution(10_000, RolloutCredit(SECOND, 200, 10_000))
    claimed = liar.credits[0].tokens / (liar.tokens + honest_trainers * honest.tokens)
    assert claimed > 0.75, "without a bound it would hand out most of the round"
    found = counted(liar, *[honest] * honest_trainers)
    share = 2 / (honest_trainers + 2)
    assert found[SECOND].tokens / sum(each.tokens for each in found.values()) <= share
    assert found[SECOND].groups / sum(each.groups for each in found.values()) <= share
    assert found[FIRST] == RolloutCredit(FIRST, 30 * honest_trainers, 1000 * honest_trainers)


def test_groups_of_few_tokens_are_bounded_by_those_of_the_other_trainers() -> None:
    """The tokens of the liar are those of anybody else; only its groups are many."""
    honest = contribution(1000, RolloutCredit(FIRST, 30, 1000))
    liar = contribution(1000, RolloutCredit(SECOND, 200, 1000))
    assert counted(liar, honest, honest)[SECOND].groups == 60


@pytest.mark.parametrize(
    ("credited", "fault"),
    [
        ([(SECOND, 1, 10), (FIRST, 1, 10)], MalformedError),
        ([(FIRST, 1, 10), (FIRST, 1, 10)], MalformedError),
        ([(FIRST, 0, 10)], MalformedError),
        ([(FIRST, 11, 10)], MalformedError),
        ([(FIRST, 1, 501), (SECOND, 1, 500)], MalformedError),
        ([(FIRST, 201, 900)], LimitError),
        ([("nobody", 1, 10)], PeerFault),
        ([(f"{number:03}", 1, 1) for number in range(MAX_CREDITS + 1)], LimitError),
    ],
)
def test_credits_that_no_honest_trainer_names_are_refused(
    credited: list[tuple[str, int, int]], fault: type[PeerFault]
) -> None:
    with pytest.raises(fault):
        received(contribution(1000, *(RolloutCredit(*each) for each in credited)))


def test_credits_survive_the_wire_and_are_refused_in_a_run_without_rollouts() -> None:
    body = contribution(1000, RolloutCredit(FIRST, 3, 600), RolloutCredit(SECOND, 200 - 3, 400))
    assert received(body) == body
    with pytest.raises(LimitError):
        received(body, replace(LIMITS, credited_groups=0))


def received(body: Contribution, limits: ContributionLimits = LIMITS) -> Contribution:
    signed = sign(TRAINERS[0], "contribution", RUN, body.to_wire())
    found = parse(signed, RUN, limits).body
    assert isinstance(found, Contribution)
    return found


def test_a_trainer_never_names_credits_that_are_refused() -> None:
    many = tuple(RolloutCredit(Identity.create().peer_id, 1 + place % 3, 50) for place in range(MAX_CREDITS + 20))
    for tokens in (1000, 300):
        credited = choose_credits(many, groups=200, tokens=tokens)
        assert credited and received(contribution(tokens, *credited)).credits == credited


def test_work_that_is_taken_back_takes_its_credits_along() -> None:
    once: Credits = (RolloutCredit(FIRST, 2, 20),)
    twice = add_credits(once, once, (RolloutCredit(SECOND, 1, 5),))
    assert twice == (RolloutCredit(FIRST, 4, 40), RolloutCredit(SECOND, 1, 5))
    assert subtract_credits(twice, once) == (RolloutCredit(FIRST, 2, 20), RolloutCredit(SECOND, 1, 5))
    assert subtract_credits(once, twice) == ()

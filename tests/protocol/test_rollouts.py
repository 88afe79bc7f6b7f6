"""Groups of rollouts: their numbering, their checks, and what a trainer takes of them."""

from dataclasses import replace

import pytest

from protocol.errors import ForgedError, LimitError, MalformedError, ManifestError, PeerFault
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.rollout_groups import (
    MAX_REPLY_BYTES,
    DrawnAnswer,
    GroupLimits,
    Place,
    RolloutGroup,
    SignedGroup,
    check_page,
    noise_parts,
    open_group,
    owner_of,
    page_of,
    question_of,
    sign_group,
)
from protocol.rollout_intake import SUM_STRIKES, RolloutIntake
from protocol.scored_tasks import TASKS
from tests.protocol.test_manifest import GOOD, fault

RL = GOOD + b'[rl]\ntask = "reverse"\nanswer_tokens = 12\ngroup = 2\ngroups = 3\n'
LIMITS = GroupLimits.of(parse_manifest(RL, "run.toml"), 5)
RUN = "a" * 64
MAKERS = [Identity.create() for _ in range(3)]
ANSWER = DrawnAnswer((104, 105, 10), (-0.5, 0.0, -1.0))
GROUP = RolloutGroup(3, 4, "cpu", (ANSWER, ANSWER))


def test_table_keeps_ids_of_other_runs_and_refuses_runs_without_trust_region() -> None:
    plain, taught = parse_manifest(GOOD, "run.toml"), parse_manifest(RL, "run.toml")
    assert b'"rl"' not in plain.canonical()
    assert taught.run_id != plain.run_id
    assert "trust region" in fault(RL + b'loss = "ppo"\n')
    assert "max_age" in fault(RL + b"max_age = 65\n")
    assert "answer_tokens" in fault(RL.replace(b"answer_tokens = 12", b"answer_tokens = 128"))
    assert "version 1" in fault(RL + b"version = 2\n")
    assert "needs audits.share = 0" in fault(RL + b"[audits]\nshare = 0.1\n")
    assert "rl.task: write one of reverse, sort" in fault(RL.replace(b"reverse", b"poems"))


def test_group_survives_the_wire_under_the_signature_of_its_maker() -> None:
    signed = sign_group(MAKERS[0], RUN, GROUP)
    assert open_group(signed, RUN, MAKERS[0].peer_id, LIMITS) == SignedGroup(MAKERS[0].peer_id, GROUP)
    with pytest.raises(ForgedError):
        open_group(signed, "b" * 64, MAKERS[0].peer_id, LIMITS)
    with pytest.raises(MalformedError, match="serves a group of"):
        open_group(signed, RUN, MAKERS[1].peer_id, LIMITS)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (replace(GROUP, answers=(ANSWER,)), "1 answers"),
        (replace(GROUP, serial=LIMITS.serials), "at most 30"),
        (replace(GROUP, round=2**40), "out of range"),
        (replace(GROUP, device="x\n"), "not one line of text"),
        (replace(GROUP, device="x" * 97), "not one line of text"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((), ()))), "0 tokens"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((1,) * 13, (0.0,) * 13))), "13 tokens"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((256,), (0.0,)))), "token 256"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((1, 2), (0.0,)))), "do not match"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((1,), (0.1,)))), "no token has"),
        (replace(GROUP, answers=(ANSWER, DrawnAnswer((1,), (float("nan"),)))), "no token has"),
    ],
)
def test_other_shape_than_the_manifest_prescribes_is_refused(group: RolloutGroup, words: str) -> None:
    with pytest.raises(PeerFault, match=words):
        open_group(sign_group(MAKERS[0], RUN, group), RUN, MAKERS[0].peer_id, LIMITS)


def test_questions_and_noise_follow_from_run_round_maker_and_serial() -> None:
    one, other = MAKERS[0].peer_id, MAKERS[1].peer_id
    places = [Place(number, serial) for number in range(3) for serial in range(5)]
    prompts = {
        question_of(TASKS["reverse"], run, maker, place).prompt
        for run in ("a", "b")
        for maker in (one, other)
        for place in places
    }
    assert len(prompts) == 2 * 2 * len(places)
    assert question_of(TASKS["reverse"], RUN, one, Place(1, 2)) == question_of(TASKS["reverse"], RUN, one, Place(1, 2))
    noise = {noise_parts(run, maker, place, 1) for run in ("a", "b") for maker in (one, other) for place in places}
    assert len(noise) == 2 * 2 * len(places)


def test_page_ends_at_its_bound_and_holds_one_group_at_least() -> None:
    signed = sign_group(MAKERS[0], RUN, GROUP)
    page = page_of([signed] * (2 * MAX_REPLY_BYTES // signed.ByteSize()))
    assert MAX_REPLY_BYTES - signed.ByteSize() < sum(each.ByteSize() for each in page) <= MAX_REPLY_BYTES
    check_page(page, Place())
    with pytest.raises(LimitError):
        check_page(page * 3, Place())


def made(number: int, serial: int, maker: int = 0) -> SignedGroup:
    return SignedGroup(MAKERS[maker].peer_id, replace(GROUP, round=number, serial=serial))


def intake(me: str = "me", capacity: int = 100, max_age: int = 2) -> RolloutIntake:
    found = RolloutIntake(RUN, me, capacity, max_age)
    found.begin_round(5, [])
    return found


def test_groups_are_taken_oldest_first_across_makers() -> None:
    pool = intake()
    for each in (made(5, 0), made(5, 1), made(4, 0, 1), made(4, 1, 1), made(5, 0, 1)):
        assert pool.offer(each) == "fetched"
    assert [each.group.place for each in pool.take(3, 5)] == [Place(4, 0), Place(4, 1), Place(5, 0)]
    assert pool.waiting == 2


def test_gap_ends_the_credit_for_the_round_and_the_next_round_counts() -> None:
    pool = intake()
    assert [pool.offer(made(5, serial)) for serial in (0, 1, 3, 4, 2)] == [
        "fetched",
        "fetched",
        "gap",
        "known",
        "known",
    ]
    pool.begin_round(6, [])
    assert pool.offer(made(6, 1, 1)) == "gap"  # the first one is missing
    assert pool.offer(made(6, 0)) == "fetched"


def test_groups_of_weights_that_a_trainer_lacks_wait_and_far_ones_are_refused() -> None:
    pool = intake()
    assert pool.offer(made(6, 0)) == "fetched"
    assert pool.take(1, 5) == []
    assert len(pool.take(1, 6)) == 1
    assert pool.offer(made(9, 0, 1)) == "too new"


def test_old_groups_are_dropped_and_their_tokens_counted() -> None:
    pool = intake()
    assert pool.offer(made(2, 0)) == "too old"
    assert pool.offer(made(3, 0)) == "fetched"
    pool.begin_round(6, [])
    assert pool.waiting == 0
    assert pool.counts["too old"] == 2
    assert pool.dropped_tokens == 2 * GROUP.tokens
    assert pool.wanted([MAKERS[0].peer_id]) == {MAKERS[0].peer_id: Place(4, 0)}


def test_full_pool_asks_for_nothing() -> None:
    pool = intake(capacity=2)
    assert pool.wanted([MAKERS[0].peer_id]) == {MAKERS[0].peer_id: Place(3, 0)}
    pool.offer(made(5, 0))
    pool.offer(made(5, 1))
    assert pool.wanted([MAKERS[0].peer_id]) == {}
    pool.take(1, 5)
    assert pool.wanted([MAKERS[0].peer_id]) == {MAKERS[0].peer_id: Place(5, 2)}


def test_restart_continues_after_the_last_group_that_was_learned() -> None:
    pool = intake()
    for serial in range(4):
        pool.offer(made(5, serial))
    pool.take(3, 5)
    pool.restart({MAKERS[0].peer_id: Place(5, 1)})  # the snapshot is older than what was handed out
    assert pool.wanted([MAKERS[0].peer_id]) == {MAKERS[0].peer_id: Place(5, 1)}
    assert [pool.offer(made(5, serial)) for serial in range(3)] == ["known", "fetched", "fetched"]


def test_two_trainers_share_the_groups() -> None:
    names = [maker.peer_id for maker in MAKERS]
    places = [Place(5, serial) for serial in range(200)]
    owned = [owner_of(names[:2], RUN, names[2], place) for place in places]
    assert 70 < owned.count(names[0]) < 130
    pools = [RolloutIntake(RUN, name, 1000, 2) for name in names[:2]]
    for pool in pools:
        pool.begin_round(5, names[:2])
        for place in places:
            pool.offer(made(5, place.serial, 2))
    assert [pool.waiting for pool in pools] == [owned.count(name) for name in names[:2]]


def test_groups_that_come_before_their_weights_are_shared_when_the_round_begins() -> None:
    """Each group has one trainer, although none knew who shares the round when it fetched them."""
    names = [maker.peer_id for maker in MAKERS[:2]]
    pools = [RolloutIntake(RUN, name, 1000, 2) for name in names]
    for pool in pools:
        pool.begin_round(4, names)
        assert {pool.offer(made(5, serial, 2)) for serial in range(50)} == {"fetched"}
        pool.begin_round(5, names)
    first, second = ({each.group.serial for each in pool.take(100, 5)} for pool in pools)
    assert first | second == set(range(50)) and not first & second
    assert [pool.counts["other trainer"] for pool in pools] == [len(second), len(first)]


def test_proof_ends_a_maker_at_once_and_failed_tests_after_some() -> None:
    pool = intake()
    liar, honest = MAKERS[0].peer_id, MAKERS[1].peer_id
    for each in (made(5, 0), made(5, 0, 1)):
        pool.offer(each)
    assert pool.strike(liar, "another token", is_proof=True)
    assert pool.offer(made(5, 1)) == "refused"
    assert [each.maker for each in pool.take(9, 5)] == [honest]
    assert [pool.strike(honest, "the sum", is_proof=False) for _ in range(SUM_STRIKES)] == [False, False, True]
    assert pool.wanted([liar, honest]) == {}


def test_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match=r"rl\.task"):
        parse_manifest(RL.replace(b"reverse", b"reward"), "run.toml")

"""Audits of results: who is avoided, who is excluded, and the proof of signed results."""

import random

import pytest

from protocol.blobs.blob import Blob
from protocol.errors import PeerFault
from protocol.identity import Identity
from protocol.murmur_pb2 import Contradiction as ContradictionBody
from protocol.pipeline.audits import ResultAudit
from protocol.pipeline.messages import HeldBlob, Inputs, Task
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.owner import Owner
from protocol.pipeline.owner_events import Ask, PeersChanged
from protocol.pipeline.results import (
    Contradiction,
    ResultValue,
    SignedResult,
    StageQuestion,
    StageResult,
    contradictions,
    sign_result,
)
from protocol.pipeline.routing import StagePeer
from tests.protocol.pipeline.virtual.audited_world import AuditedWorld, Lie
from tests.protocol.pipeline.virtual.scenario import run_id

RUN = "ab" * 32
SERVERS = [Identity.create() for _ in range(12)]
NAMES = [server.peer_id for server in SERVERS]
QUESTION = StageQuestion(3, bytes(32), "forward", (b"\1" * 32, b"", b""), "cpu 1")
TRUE, FALSE = (ResultValue(Blob.of(content), None) for content in (b"true", b"false"))
TASK = Task(RUN, "owner", 1, "forward", 1, 0, 3, Inputs(), 1000, replay=True)
SECONDS = 15.0


def result(number: int, value: ResultValue = TRUE, question: StageQuestion = QUESTION) -> SignedResult:
    return sign_result(SERVERS[number], RUN, StageResult(question, value))


def audit_of(first: SignedResult, *others: SignedResult) -> tuple[ResultAudit, list[int]]:
    """Return an audit that asks these servers one after the other, and the sizes of its panels."""
    by_name = {other.maker: other for other in others}
    audit, sizes = ResultAudit(first, TASK, list(by_name), 10.0), list[int]()
    while peers := audit.next_peers():
        sizes.append(1 + audit._used)
        for peer in peers:
            audit.asked[peer] = 1
        for peer in peers:
            audit.add(by_name[peer])
    return audit, sizes


# What one audit decides.


def test_equal_results_end_an_audit_after_one_repetition() -> None:
    audit, sizes = audit_of(*(result(number) for number in range(5)))
    assert audit.end().verdict == "equal" and sizes == [2] and audit.is_over


def test_panel_grows_after_a_difference_until_all_have_answered() -> None:
    audit, sizes = audit_of(result(0, FALSE), *(result(number) for number in range(1, 12)))
    end = audit.end()
    assert sizes == [2, 3, 9, 12]
    assert end.verdict == "different" and end.wrong == {NAMES[0]} and len(end.results) == 12


def test_auditor_that_lies_is_the_wrong_one() -> None:
    audit, _ = audit_of(result(0), result(1, FALSE), result(2), result(3))
    assert audit.end().wrong == {NAMES[1]}


def test_two_results_alone_decide_nothing() -> None:
    audit, _ = audit_of(result(0, FALSE), result(1))
    end = audit.end()
    assert end.verdict == "undecided" and not end.wrong


def test_other_kind_of_device_is_not_compared_and_another_one_is_asked() -> None:
    card = QUESTION._replace(kind="cuda")
    audit, _ = audit_of(result(0), result(1, FALSE, card), result(2))
    assert audit.end().verdict == "equal" and len(audit.results) == 3
    assert audit_of(result(0), result(1, FALSE, card))[0].end().verdict == "unanswered"


def test_server_on_another_chain_is_avoided_without_evidence() -> None:
    other = QUESTION._replace(base=b"\7" * 32)
    audit, _ = audit_of(result(0, FALSE, other), *(result(number) for number in range(1, 4)))
    end = audit.end()
    assert end.wrong == {NAMES[0]}
    assert not any(found.proves(NAMES[:4]) for found in contradictions(RUN, end.results))


def test_servers_that_do_not_answer_leave_the_audit_open_to_others() -> None:
    audit = ResultAudit(result(0), TASK, NAMES[1:4], 10.0)
    assert audit.next_peers() == NAMES[1:2]
    audit.asked[NAMES[1]] = 2
    assert audit.expects(NAMES[1]) and not audit.next_peers()
    audit.give_up(NAMES[1])
    assert audit.next_peers() == NAMES[2:3]


# What signed results prove.


@pytest.mark.parametrize(
    ("liars", "honest", "voters", "is_proved"),
    [(1, 4, 6, True), (1, 3, 6, False), (3, 7, 10, True), (1, 2, 0, False)],
    ids=["two thirds", "fewer", "liars agree", "no voters yet"],
)
def test_two_thirds_of_the_voters_exclude(liars: int, honest: int, voters: int, is_proved: bool) -> None:
    results = [result(number, FALSE if number < liars else TRUE) for number in range(liars + honest)]
    proved = [found.liar for found in contradictions(RUN, results) if found.proves(NAMES[:voters])]
    assert proved == (NAMES[:liars] if is_proved else [])


@pytest.mark.parametrize(
    "change",
    [
        lambda question: question._replace(round=4),
        lambda question: question._replace(base=b""),
        lambda question: question._replace(inputs=(b"\2" * 32, b"", b"")),
        lambda question: question._replace(kind="cuda"),
        lambda question: question._replace(direction="backward"),
    ],
)
def test_answers_to_different_questions_prove_nothing(change: object) -> None:
    false = result(0, FALSE, change(QUESTION))  # type: ignore[operator]
    found = Contradiction(RUN, (false, *(result(number) for number in range(1, 6))))
    assert not found.proves(NAMES[:6])


def test_a_key_counts_once_and_strangers_do_not_count() -> None:
    repeated = Contradiction(RUN, (result(0, FALSE), *([result(1)] * 5)))
    assert not repeated.proves(NAMES[:6])
    strangers = Contradiction(RUN, (result(0, FALSE), *(result(number) for number in range(6, 12))))
    assert not strangers.proves(NAMES[:6])
    mixed = Contradiction(RUN, (result(0, FALSE), *(result(number) for number in range(1, 5)), result(5, FALSE)))
    assert not mixed.proves(NAMES[:6])


def test_a_contradiction_survives_the_wire_and_nobody_else_writes_one() -> None:
    found = Contradiction(RUN, (result(0, FALSE), *(result(number) for number in range(1, 5))))
    body = ContradictionBody.FromString(found.to_wire().SerializeToString())
    assert Contradiction.from_wire(body) == found
    body.results[0].peer = NAMES[5]
    with pytest.raises(PeerFault):
        Contradiction.from_wire(body)
    with pytest.raises(PeerFault):
        Contradiction.from_wire(ContradictionBody(run=bytes(32), results=[result(0).signed]))


# Pipelines with liars, in virtual time.


@pytest.mark.parametrize("lie", ["activations", "gradients", "audits"])
def test_liar_is_excluded_and_no_honest_server_is(lie: Lie) -> None:
    world = AuditedWorld(lie, share=0.5)
    world.run(SECONDS)
    assert world.excluded.keys() == world.avoided == world.liars
    found = world.excluded["server-1-0"]
    assert found < SECONDS - 2
    assert max(world.lies) < found + 1, "whatever was under way"
    assert world.steps > 1 and world.counted("contradicted")


@pytest.mark.parametrize("lie", ["activations", "gradients"])
def test_control_without_audits_nobody_notices(lie: Lie) -> None:
    world = AuditedWorld(lie, share=0.0)
    world.run(SECONDS)
    assert not world.excluded and not world.avoided
    assert len(world.lies) > 5 and max(world.lies) > SECONDS / 2


def test_honest_servers_are_neither_avoided_nor_excluded() -> None:
    world = AuditedWorld("activations", share=1.0, liars=0)
    world.run(SECONDS)
    assert not world.excluded and not world.avoided
    assert world.counted("audited") > 20 and world.steps > 1


def test_two_liars_of_four_convict_nobody() -> None:
    """They lie each for itself; a third of the votes is the limit of every promise about them."""
    world = AuditedWorld("activations", share=0.5, liars=2)
    world.run(SECONDS)
    assert world.excluded.keys() <= world.liars


# Servers whose results harm us.


def test_owner_avoids_a_server_that_it_distrusts() -> None:
    owner = Owner(OwnerSettings("me", 64), [run_id(0), run_id(1)], random.Random(1))
    peers = tuple(StagePeer(name, 1, 0, 4.0) for name in ("good", "bad"))
    owner.handle(PeersChanged((peers, peers), 0), 0.0)
    owner.distrust("bad", 0.0)
    tokens = HeldBlob(Blob.of(b"tokens"), "me")
    asked = [
        action.peer for serial in range(6) for action in owner.begin(serial, tokens, 1.0) if isinstance(action, Ask)
    ]
    assert asked and set(asked) == {"good"}

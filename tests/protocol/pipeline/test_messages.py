import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.errors import LimitError, PeerFault
from protocol.identity import Identity
from protocol.pipeline.messages import (
    MAX_ACTIVATION_BYTES,
    MAX_ATTEMPT,
    MAX_DEADLINE_MS,
    MAX_RATE,
    MAX_RELEASED,
    MAX_RETRY_MS,
    MAX_SERIAL,
    Answer,
    HeldBlob,
    Inputs,
    Outcome,
    Task,
    invitation_to_wire,
    question_of,
    read_invitation,
    read_release,
    release_to_wire,
)
from protocol.pipeline.results import ResultValue, SignedResult, StageResult, open_result, sign_result
from protocol.signing import MAX_ROUND

RUN = "ab" * 32
MAKER, OTHER = Identity.create(), Identity.create()
OWNER, HOLDER = OTHER.peer_id, MAKER.peer_id
HELD = HeldBlob(Blob.of(b"activation"), HOLDER)
TASK = Task(RUN, OWNER, 7, "backward", 3, 11, 5, Inputs(HELD, HELD, HELD), 1000, replay=True)
FORWARD = replace(TASK, direction="forward")


def signed(task: Task, blob: Blob | None, loss: float | None = None, maker: Identity = MAKER) -> SignedResult:
    """Return a result as its maker signs it."""
    result = StageResult(question_of(task, bytes(32), "cpu"), ResultValue(blob, loss))
    return sign_result(maker, task.run, result)


OUTCOME = Outcome(
    RUN, 7, "forward", 3, 11, "done", HELD.blob, False, 2.5, 12.0, 3.5, signed=signed(FORWARD, HELD.blob, 2.5)
)
BACKWARD = replace(OUTCOME, added=True, direction="backward", loss=None, signed=signed(TASK, HELD.blob))
MISSING = replace(OUTCOME, status="missing", missing="gradient", result=None, loss=None, signed=None)
ANSWER = Answer("known", 11, 5, 3.5, 0, OUTCOME)


@pytest.mark.parametrize("task", [TASK, replace(TASK, inputs=Inputs(tokens=HELD), direction="forward", replay=False)])
def test_a_task_survives_the_wire(task: Task) -> None:
    assert Task.from_wire(wire.StageTask.FromString(task.to_wire().SerializeToString()), OWNER) == task


@pytest.mark.parametrize("outcome", [OUTCOME, MISSING, BACKWARD])
def test_an_outcome_survives_the_wire(outcome: Outcome) -> None:
    body = wire.StageOutcome.FromString(outcome.to_wire().SerializeToString())
    read = Outcome.from_wire(body, HOLDER)
    assert read == outcome and read.signed == outcome.signed


@pytest.mark.parametrize(
    "forged",
    [
        None,
        signed(FORWARD, HELD.blob, 2.5, OTHER),
        signed(FORWARD, Blob.of(b"other"), 2.5),
        signed(FORWARD, HELD.blob, 2.6),
        signed(TASK, HELD.blob, 2.5),
        signed(replace(FORWARD, run="cd" * 32), HELD.blob, 2.5),
    ],
    ids=["unsigned", "other key", "other result", "other loss", "other direction", "other stage"],
)
def test_only_the_sender_signs_the_result_of_its_outcome(forged: SignedResult | None) -> None:
    with pytest.raises(PeerFault):
        Outcome.from_wire(replace(OUTCOME, signed=forged).to_wire(), HOLDER)


def test_holder_is_the_maker_only_of_what_it_has_signed() -> None:
    held = HeldBlob(HELD.blob, HOLDER, signed(FORWARD, HELD.blob, 2.5).signed)
    read = HeldBlob.from_wire(wire.HeldBlob.FromString(held.to_wire().SerializeToString()))
    assert read.is_made_by_holder(RUN, "forward")
    assert not read.is_made_by_holder(RUN, "backward")
    assert not read.is_made_by_holder("cd" * 32, "forward")
    assert not replace(read, blob=Blob.of(b"other")).is_made_by_holder(RUN, "forward")
    assert not replace(read, holder=OWNER).is_made_by_holder(RUN, "forward")
    assert not HELD.is_made_by_holder(RUN, "forward")
    body = held.to_wire()
    body.result.body += bytes(2000)
    with pytest.raises(LimitError):
        HeldBlob.from_wire(body)


def test_a_signed_result_survives_the_wire() -> None:
    for each in (signed(FORWARD, HELD.blob, 2.5), signed(TASK, None)):
        assert open_result(each.signed, RUN) == each


@pytest.mark.parametrize("answer", [ANSWER, Answer("busy", 11, 5, 0.0, 250)])
def test_an_answer_survives_the_wire(answer: Answer) -> None:
    assert Answer.from_wire(wire.AskReply.FromString(answer.to_wire().SerializeToString()), HOLDER) == answer


def test_a_release_survives_the_wire() -> None:
    assert read_release(release_to_wire(RUN, {3, 1, 2})) == (RUN, (1, 2, 3))
    with pytest.raises(LimitError):
        read_release(release_to_wire(RUN, range(MAX_RELEASED + 1)))
    with pytest.raises(PeerFault):
        read_release(wire.ReleaseRequest(run=bytes(31)))
    with pytest.raises(PeerFault):
        read_release(wire.ReleaseRequest(run=bytes(32), serials=[MAX_SERIAL + 1]))


def test_an_invitation_survives_the_wire() -> None:
    assert read_invitation(invitation_to_wire(RUN)) == RUN
    with pytest.raises(PeerFault):
        read_invitation(wire.InviteRequest(run=bytes(31)))


def _set(**fields: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for name, value in fields.items():
            setattr(body, name, value)

    return change


COMMON = [
    _set(run=bytes(31)),
    _set(run=b""),
    _set(serial=MAX_SERIAL + 1),
    _set(attempt=MAX_ATTEMPT + 1),
    _set(life=2**63),
]


@pytest.mark.parametrize(
    "change",
    [
        *COMMON,
        _set(round=MAX_ROUND + 1),
        _set(deadline_ms=MAX_DEADLINE_MS + 1),
        lambda body: body.activation.blob.__setattr__("size", MAX_ACTIVATION_BYTES + 1),
        lambda body: body.activation.blob.__setattr__("size", 0),
        lambda body: body.tokens.blob.__setattr__("digest", bytes(31)),
        lambda body: body.gradient.__setattr__("holder", "somebody"),
        lambda body: body.gradient.__setattr__("holder", ""),
    ],
)
def test_a_task_out_of_bounds_is_refused(change: Callable[[wire.StageTask], None]) -> None:
    body = TASK.to_wire()
    change(body)
    with pytest.raises(PeerFault):
        Task.from_wire(body, OWNER)


@pytest.mark.parametrize(
    "change",
    [
        *COMMON,
        _set(status="excellent"),
        _set(status="missing"),
        _set(missing="activation"),
        _set(missing="\x1b[2J"),
        _set(loss=math.nan),
        _set(loss=math.inf),
        _set(loss=-1.0),
        _set(compute_ms=math.nan),
        _set(compute_ms=-1.0),
        _set(rate=MAX_RATE * 2),
        _set(rate=math.inf),
        lambda body: body.result.__setattr__("size", MAX_ACTIVATION_BYTES + 1),
    ],
)
def test_an_outcome_out_of_bounds_is_refused(change: Callable[[wire.StageOutcome], None]) -> None:
    body = OUTCOME.to_wire()
    change(body)
    with pytest.raises(PeerFault):
        Outcome.from_wire(body, HOLDER)


@pytest.mark.parametrize(
    "change",
    [
        _set(kind="gladly"),
        _set(kind="busy"),
        _set(life=2**63),
        _set(round=MAX_ROUND + 1),
        _set(retry_ms=MAX_RETRY_MS + 1),
        _set(rate=-1.0),
        lambda body: body.ClearField("outcome"),
        lambda body: body.outcome.__setattr__("rate", math.nan),
    ],
)
def test_an_answer_out_of_bounds_is_refused(change: Callable[[wire.AskReply], None]) -> None:
    body = ANSWER.to_wire()
    change(body)
    with pytest.raises(PeerFault):
        Answer.from_wire(body, HOLDER)

"""Every stage is a run of its own."""

from dataclasses import replace

import pytest

from protocol.admission import Ticket, issue_ticket
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Adoption, Commit, Contribution, ContributionLimits
from protocol.consensus.messages.kinds import parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ForgedError
from protocol.identity import Identity
from protocol.pipeline.stage import stage_run_id, stage_run_ids
from protocol.signing import sign
from protocol.steering import Revision, encode_changes

RUN = "ab" * 32
ORGANISER, MEMBER = Identity.create(), Identity.create()
DIGEST = bytes(32)


def test_every_stage_of_every_cut_of_every_run_has_an_id_of_its_own() -> None:
    ids = [
        stage_run_id(run, stages, stage)
        for run in (RUN, "cd" * 32)
        for stages in range(2, 12)
        for stage in range(stages)
    ]
    assert len({*ids, RUN}) == len(ids) + 1
    assert all(len(found) == 64 and int(found, 16) >= 0 for found in ids)
    assert stage_run_ids(RUN, 3) == tuple(stage_run_id(RUN, 3, stage) for stage in range(3))


def test_id_of_a_stage_never_changes() -> None:
    """Peers of different versions must agree on it."""
    assert stage_run_id(RUN, 4, 1) == "99b50f75d28de1f448807ae977373090cf150b98f3e560cba40a2c38b52d29d2"


def test_a_run_with_one_stage_keeps_its_id() -> None:
    assert stage_run_ids(RUN, 1) == (RUN,)


@pytest.mark.parametrize(("stages", "stage"), [(4, 4), (4, -1), (0, 0)])
def test_a_stage_that_is_not_there_has_no_id(stages: int, stage: int) -> None:
    with pytest.raises(ValueError, match="there is no stage"):
        stage_run_id(RUN, stages, stage)


def limits_of(whole_run: str) -> ContributionLimits:
    return ContributionLimits("none", DIGEST, 1, 1000, 1000, ORGANISER.peer_id, whole_run)


def revision_for(run_id: str) -> SignedMessage[Revision]:
    body = Revision(1, b"", 4, encode_changes({"target.rounds": 5}), 1.0)
    return SignedMessage.of(sign(ORGANISER, "revision", run_id, body.to_wire()), body)


def contribution_for(stage: str, ticket_run: str) -> SignedMessage[Contribution]:
    ticket = Ticket(MEMBER.peer_id, 2.0**31)
    shown = SignedMessage.of(issue_ticket(ORGANISER, ticket_run, ticket), ticket)
    body = Contribution(3, DIGEST, "none", DIGEST, 10, 1, 1.0, (Blob.of(b"x"),), ticket=shown)
    return SignedMessage.of(sign(MEMBER, "contribution", stage, body.to_wire()), body)


def test_organiser_signs_for_the_whole_run_and_each_stage_takes_it() -> None:
    """A stage that asks for signatures with its own id, or that takes those of any stage, fails."""
    ids = stage_run_ids(RUN, 2)
    for stage in ids:
        adoption = Adoption(revision_for(RUN).digest, (revision_for(RUN),))
        commit = Commit(3, 0, DIGEST, (contribution_for(stage, RUN),), (), adoption=adoption)
        adopted = parse(sign(MEMBER, "commit", stage, commit.to_wire()), stage, limits_of(RUN)).body
        assert isinstance(adopted, Commit) and adopted.adoption == adoption
        assert [entry.body.ticket is not None for entry in adopted.contributions] == [True]
        for other in (*ids, "cd" * 32):
            with pytest.raises(ForgedError):
                parse(contribution_for(stage, other).signed, stage, limits_of(RUN))
            forged = replace(commit, adoption=Adoption(revision_for(other).digest, (revision_for(other),)))
            with pytest.raises(ForgedError):
                parse(sign(MEMBER, "commit", stage, forged.to_wire()), stage, limits_of(RUN))
    with pytest.raises(ForgedError):  # a stage that knows no whole run takes only signatures that name the stage
        parse(contribution_for(ids[0], RUN).signed, ids[0], limits_of(""))

"""One object that says where the node stands; the counters agree with it."""

import logging
from types import SimpleNamespace

import pytest

from node.ipc.channel import ContributionHeader, Evaluated, PauseChanged, Ready, TrainerProgress, TrainerWarning
from node.loop.contributions import SettledContribution, StoredContribution
from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus, Phase
from node.monitoring.status_reporter import StatusReporter
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages import AppliedContributions, Commit
from protocol.errors import ForgedError, MalformedError
from tests.node.small_run import PEERS, commit_of

HEAD = ChainHead(3, bytes([7]) * 32, 900)
MESSAGE = ContributionHeader(round=2, sizes=(3,), tokens=9, steps=1, loss=1.0)


@pytest.fixture
def standing() -> StatusReporter:
    status = NodeStatus(peer_id="me", run="small", run_id="00" * 32)
    made = StatusReporter(status, Metrics())
    made.add_source(Fields(peers=4))
    return made


class Fields:
    """A part that knows some fields of the status."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def status_fields(self) -> dict[str, object]:
        return self.values


def commits(count: int) -> list[Commit]:
    return [commit_of(ChainHead(number, bytes(32), 0), {1: Blob.of(b"x")}).body for number in range(count)]


def test_what_the_trainer_says_and_what_is_read_when_asked(standing: StatusReporter) -> None:
    standing.on_trainer_message(Ready(device="cpu", step=0, round=0, outstanding=None))
    standing.on_trainer_message(
        TrainerProgress(step=7, tokens=70, loss=2.5, tokens_per_second=9.0, seconds={"compute": 1.0})
    )
    standing.set_head(ChainHead(3, bytes(32), 0), bytes(32))
    standing.on_trainer_message(Evaluated(round=3, loss=2.0, tokens=10))
    status = standing.status()
    assert (status.step, status.tokens, status.loss, status.seconds) == (7, 70, 2.5, {"compute": 1.0})
    assert (status.validation_loss, status.validation_round, status.peers) == (2.0, 3, 4)
    assert status.since > 0


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_loss_that_was_measured_on_a_chain_that_we_left_is_told_no_more(
    standing: StatusReporter, number: int
) -> None:
    def measure(number: int) -> tuple[float | None, int | None]:
        standing.on_trainer_message(Evaluated(round=number, loss=float(number), tokens=10))
        return standing.status().validation_loss, standing.status().validation_round

    standing.set_head(ChainHead(3, b"ours" * 8, 0), bytes(32))
    assert measure(3) == (3.0, 3)
    standing.reset_validation(ChainHead(number, b"them" * 8, 0))
    assert standing.status().validation_loss is standing.status().validation_round is None
    standing.set_head(ChainHead(number, b"them" * 8, 0), bytes(32))
    if number != 3:  # of the same round, one that comes late cannot be told from the other chain's
        assert measure(3) == (None, None)
    assert measure(number) == (number, number)
    standing.set_head(ChainHead(number + 1, b"them" * 8, 0), bytes(32))
    assert measure(number + 1) == (number + 1, number + 1)


def test_fewer_steps_are_told_once_and_stand_in_the_line(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = "10 of 40 steps a round: this machine is 4.0 times slower than the others"
    for said in ("", words, words):
        standing.set_pace(said)
    assert caplog.messages == [words]
    assert words in standing.status().summary()
    standing.record_early_submit()
    standing.set_pace("")
    assert caplog.messages[1:] == [
        "the others wait: asking the trainer for what it has",
        "all steps a round: this machine is as fast as the others",
    ]
    assert standing.status().pace == ""


def test_a_pause_is_told_counted_and_over_with_the_next_word(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    standing.set_phase("training")
    standing.on_trainer_message(PauseChanged(reason="others use 60% of the processors"))
    assert standing.status().describe_contributing() == "no: paused, others use 60% of the processors"
    standing.on_trainer_message(PauseChanged(reason=""))
    assert standing.status().paused == ""
    standing.on_trainer_message(PauseChanged(reason="again"))
    standing.on_trainer_message(Ready(device="cpu", step=0, round=0, outstanding=None))
    assert standing.status().paused == "", "a trainer that was started anew looks for itself"
    assert standing._metrics.pauses == 2
    assert caplog.messages[1:3] == ["training pauses: others use 60% of the processors", "training goes on"]


def test_of_rounds_that_were_skipped_nothing_is_said_that_we_do_not_know(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    standing.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert "round 3: 1 contribution, ours not among them" in caplog.text
    caplog.clear()
    standing.record_rounds(HEAD, bytes(32), [], "none")
    standing.record_rounds(HEAD, bytes(32), commits(2), "included")
    assert "contributions" not in caplog.text and caplog.text.count("round 3: taken over") == 2


def test_phases_are_logged_once(standing: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing.set_phase("catching up", "others are ahead")
    standing.set_phase("catching up", "others are ahead")
    assert caplog.messages == ["catching up: others are ahead"]
    assert (standing.status().phase, standing.status().reason) == ("catching up", "others are ahead")
    standing.set_phase("training")
    assert standing.status().reason == ""


def test_included(standing: StatusReporter) -> None:
    standing.record_rounds(HEAD, bytes(32), commits(1), "included")
    status = standing.status()
    assert (status.round, status.chain_tokens, status.digest) == (3, 900, HEAD.digest.hex())
    assert (status.contributions_included, status.last_included_round) == (1, 2)
    assert standing._metrics.rounds == {"included": 1}


def test_given_back_and_missed(standing: StatusReporter) -> None:
    standing.record_rounds(HEAD, bytes(32), commits(1), "excluded")
    standing.record_rounds(HEAD, bytes(32), commits(3), "none")
    standing.record_rounds(HEAD, bytes(32), commits(3), "included")
    standing.record_rounds(HEAD, bytes(32), [], "none")
    standing.set_miss_reason("the state differed")
    assert standing._metrics.rounds == {"excluded": 1, "missed": 5, "included": 1}
    assert standing.status().absence == "the state differed" and standing.status().contributions_excluded == 1
    assert standing._metrics.missed_rounds == {"excluded": 1, "catching up": 5}, "each round without us has its reason"


def test_of_rounds_that_came_at_once_the_one_with_our_work_counts_as_the_last(standing: StatusReporter) -> None:
    standing._status = standing._status.model_copy(update={"peer_id": PEERS[1].peer_id})
    ours = commit_of(ChainHead(0, bytes(32), 0), {1: Blob.of(b"x")}).body
    others = [commit_of(ChainHead(number, bytes(32), 0), {2: Blob.of(b"x")}).body for number in range(1, 10)]
    standing.record_rounds(ChainHead(10, bytes(32), 900), bytes(32), [ours, *others], "included")
    standing.set_phase("training")
    why = "no, not in the last 9 rounds: it was decided before this node had caught up"
    assert standing.status().last_included_round == 0 and standing.status().describe_contributing() == why


def test_what_another_chain_took_is_no_contribution_to_this_one(standing: StatusReporter) -> None:
    standing.record_rounds(ChainHead(200, bytes(32), 10_000), bytes(32), commits(1), "included")
    assert standing.status().describe_contributing() == "no: starting"
    standing.set_phase("training")
    assert standing.status().describe_contributing() == "yes"
    standing.record_rounds(ChainHead(50, bytes(32), 20_000), bytes(32), commits(2), "none")
    assert standing.status().last_included_round is None
    assert standing.status().describe_contributing() == "no: it was decided before this node had caught up"


def test_who_rests_has_no_speed_and_who_goes_on_has_its_own_again(standing: StatusReporter) -> None:
    standing.on_trainer_message(TrainerProgress(step=7, tokens=70, loss=2.5, tokens_per_second=9.0, seconds={}))
    standing.on_trainer_message(PauseChanged(reason="others use the processors"))
    assert standing.status().tokens_per_second == 0
    standing.on_trainer_message(PauseChanged(reason=""))
    assert standing.status().tokens_per_second == 9
    standing.add_source(Fields(trainer_trouble="it died"))
    assert standing.status().tokens_per_second == 0


def test_that_no_round_is_decided_any_more_is_said() -> None:
    now = [100.0]
    standing = StatusReporter(NodeStatus(peer_id="me", run="small", run_id="00" * 32), Metrics(), lambda: now[0])

    def round_after(seconds: float, phase: Phase = "training") -> str:
        standing.set_phase(phase)
        now[0] += seconds
        told = standing.status().standstill
        standing.record_rounds(HEAD, bytes(32), commits(1), "included")
        return told

    assert [round_after(seconds) for seconds in (9000, 30, 40, 30)] == 4 * [""], "how long the first takes nobody knows"
    assert round_after(150) == ""
    assert round_after(900) == "no round was decided for 15 min, the last ones took 150 s at most"
    assert round_after(3600) == "", "they take so long now"
    standing.set_phase("training")
    now[0] += 6 * 3600
    assert standing.status().describe_contributing().startswith("no: no round was decided for 360 min")
    assert round_after(1, "catching up").startswith("no round")
    assert round_after(9000) == "", "what was replayed is no measure"


def test_what_goes_wrong_in_the_trainer_is_counted_and_said(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    standing.on_trainer_message(TrainerWarning(reason="step left out", line="the loss of inner step 3 is not finite"))
    assert standing.status().setbacks == {"step left out": 1}
    assert caplog.messages == ["step left out: the loss of inner step 3 is not finite"]


def test_the_mishap_of_a_round_is_said_until_a_round_takes_our_work(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    standing.set_phase("training")
    standing.on_trainer_message(MESSAGE)
    standing.record_rejected("me", "left out")
    standing.record_rejected("me", "late")  # what came of it
    standing.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert "ours not among them (left out)" in caplog.messages[-1]
    standing.set_phase("training")
    assert "too few peers got our message in time" in standing.status().describe_contributing()
    standing.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert standing._metrics.missed_rounds == {"left out": 1, "late": 1}, "it still waits, and nothing else befell it"
    standing.record_rounds(HEAD, bytes(32), commits(1), "included")
    assert standing.status().describe_contributing() == "yes"
    standing.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert standing._metrics.missed_rounds["slow"] == 1, "there was no message that the round could have taken"


def test_what_befell_others_is_not_our_reason(standing: StatusReporter) -> None:
    """The control."""
    standing.set_phase("training")
    standing.record_rejected("them", "left out")
    standing.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert standing._metrics.missed_rounds == {"slow": 1}


def test_what_was_caught_up_is_counted(standing: StatusReporter) -> None:
    standing.record_catch_up("replayed", 1)
    standing.record_catch_up("replayed", 1)
    standing.record_catch_up("skipped", 30)
    assert standing._metrics.catch_ups == {"replayed": 2, "skipped": 30}


def test_another_fate_on_another_chain_is_counted_and_said(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    message = ContributionHeader(round=7, sizes=(4,), tokens=100, steps=5, loss=3.0)
    standing.record_revised([SettledContribution(StoredContribution(message, ()), 7, "excluded", "included")])
    assert standing._metrics.revisions == {"excluded": 1}
    assert "the message of round 7 is not applied, and is given back on this chain" in caplog.text


def test_what_went_in_is_counted_and_said(standing: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    parts = (Blob.of(b"four"), Blob.of(b"of six"))
    both = commit_of(HEAD, {0: parts, 1: parts[:1]}).body.contributions
    standing.record_applied(AppliedContributions.of(both), 1.0)
    standing.record_applied(AppliedContributions.of(()), 0.25)
    assert standing._metrics.applied == {"contributions": 2, "parts": 3, "bytes": 14}
    assert standing._metrics.outer_steps == 1.25
    assert caplog.messages == [
        "2 contributions went in, 3 parts of 14 B", "0 contributions went in, 0 parts of 0 B, 0.25 of a step",
    ]  # fmt: skip


def test_setbacks_are_counted_and_said(standing: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing.record_recovered("not delivered", "gave up 3 statements")
    standing.record_recovered("blob missing", "round 3 goes on")
    assert standing.status().setbacks == {"not delivered": 1, "blob missing": 1}
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    lines = "not delivered: gave up 3 statements", "blob missing: round 3 goes on"
    assert told == [(logging.INFO, lines[0]), (logging.WARNING, lines[1])]


def test_all_that_was_wrong_in_one_call_is_counted_and_said_in_one_line(
    standing: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    standing.record_refusal(
        "them", ForgedError("a wrong signature"), MalformedError("nonsense"), ForgedError("another")
    )
    assert standing.status().refusals == {"forged": 2, "malformed": 1}
    assert caplog.messages == ["refused what them sent (forged): a wrong signature (and 2 more)"]


def test_refusals_are_counted_and_said(standing: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing.record_refusal("them", ForgedError("not theirs"))
    standing.record_rejected("them", "late")
    standing.record_rejected(None, "leader silent")
    for counts in ({"forged": 2}, {"dht": 0}):
        standing._metrics.add_refusal_counter(SimpleNamespace(refusals=counts))
    assert standing.status().refusals == {"forged": 3, "late": 1, "leader silent": 1}
    assert caplog.messages == [
        "refused what them sent (forged): not theirs", "late: them", "leader silent: this round"
    ]  # fmt: skip

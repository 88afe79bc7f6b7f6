"""The status reporter keeps status, counters and log in agreement."""

import logging
from types import SimpleNamespace

import pytest

from node.loop.contributions import SettledContribution, StoredContribution
from node.monitoring.metrics import Metrics
from node.monitoring.status import DeviceUse, NodeStatus, Phase
from node.monitoring.status_reporter import StatusReporter
from node.trainer.ipc.channel import (
    ContributionHeader,
    Evaluated,
    PauseChanged,
    Ready,
    RowsSkipped,
    TrainerProgress,
    TrainerWarning,
)
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import AppliedContributions, Commit
from protocol.errors import ForgedError, MalformedError
from protocol.membership.record_fields import encode_source_losses
from protocol.murmur_pb2 import PeerRecord
from tests.node.small_run import PEERS, commit_of

HEAD = ChainHead(3, bytes([7]) * 32, 900)
MESSAGE = ContributionHeader(round=2, sizes=(3,), tokens=9, steps=1, loss=1.0)


@pytest.fixture
def reporter() -> StatusReporter:
    status = NodeStatus(peer_id="me", run="small", run_id="00" * 32)
    reporter = StatusReporter(status, Metrics())
    reporter.add_source(Fields(peers=4))
    return reporter


class Fields:
    """A source with fixed status fields."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def status_fields(self) -> dict[str, object]:
        return self.values


def commits(count: int) -> list[Commit]:
    return [commit_of(ChainHead(number, bytes(32), 0), {1: Blob.of(b"x")}).body for number in range(count)]


def test_status_has_trainer_messages_and_fields_of_sources(reporter: StatusReporter) -> None:
    reporter.on_trainer_message(Ready(device="cpu", step=0, round=0, outstanding=None))
    reporter.on_trainer_message(
        TrainerProgress(step=7, tokens=70, loss=2.5, tokens_per_second=9.0, seconds={"compute": 1.0})
    )
    reporter.set_head(ChainHead(3, bytes(32), 0), bytes(32))
    reporter.on_trainer_message(Evaluated(round=3, loss=2.0, tokens=10))
    status = reporter.status()
    assert (status.step, status.tokens, status.loss, status.seconds) == (7, 70, 2.5, {"compute": 1.0})
    assert (status.validation_loss, status.validation_round, status.peers) == (2.0, 3, 4)
    assert status.since > 0


def test_validation_of_a_mixture_is_shown_by_source(reporter: StatusReporter) -> None:
    reporter.set_head(ChainHead(3, bytes(32), 0), bytes(32))
    reporter.on_trainer_message(Evaluated(round=3, loss=2.0, tokens=10))
    assert reporter.status().describe_validation() == "validation 2.000"
    reporter.on_trainer_message(Evaluated(round=3, loss=2.0, tokens=10, by_source={"code": 1.5, "books": 2.5}))
    status = reporter.status()
    assert status.describe_validation() == "validation 2.000 (code 1.500, books 2.500)"
    assert status.record_fields()["validation_by_source"] == encode_source_losses((1.5, 2.5))


def test_learning_rate_and_device_use_reach_the_record(reporter: StatusReporter) -> None:
    progress = TrainerProgress(
        step=7, tokens=70, loss=2.5, tokens_per_second=9.0, seconds={}, learning_rate=1e-3, gradient_norm=0.5
    )
    reporter.on_trainer_message(progress)
    fields = reporter.status().record_fields()
    assert (fields["learning_rate"], fields["gradient_norm"], fields["device_memory"]) == (1e-3, 0.5, 0)
    assert "device_use" not in fields  # a CPU has none, which differs from an idle accelerator
    device = DeviceUse(share=0.0, memory=10, memory_total=40)
    reporter.on_trainer_message(progress.model_copy(update={"device_use": device}))
    fields = reporter.status().record_fields()
    assert (fields["device_use"], fields["device_memory"], fields["device_memory_total"]) == (0.0, 10, 40)
    for name, value in fields.items():  # every field exists
        setattr(PeerRecord(), name, value)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_validation_loss_of_a_chain_that_was_left_is_not_reported(reporter: StatusReporter, number: int) -> None:
    def measure(number: int) -> tuple[float | None, int | None]:
        reporter.on_trainer_message(Evaluated(round=number, loss=float(number), tokens=10))
        return reporter.status().validation_loss, reporter.status().validation_round

    reporter.set_head(ChainHead(3, b"ours" * 8, 0), bytes(32))
    assert measure(3) == (3.0, 3)
    reporter.reset_validation(ChainHead(number, b"them" * 8, 0))
    assert reporter.status().validation_loss is reporter.status().validation_round is None
    reporter.set_head(ChainHead(number, b"them" * 8, 0), bytes(32))
    if number != 3:  # a late one of the same round cannot be distinguished from the other chain's
        assert measure(3) == (None, None)
    assert measure(number) == (number, number)
    reporter.set_head(ChainHead(number + 1, b"them" * 8, 0), bytes(32))
    assert measure(number + 1) == (number + 1, number + 1)


def test_reduced_pace_is_logged_once_and_shown_in_the_summary(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = "10 of 40 steps per round: this machine is 4.0 times slower than the others"
    for pace in ("", text, text):
        reporter.set_pace(pace)
    assert caplog.messages == [text]
    assert text in reporter.status().summary()
    reporter.record_early_submit()
    reporter.set_pace("")
    assert caplog.messages[1:] == ["all steps per round: this machine is as fast as the others"]
    assert reporter.status().pace == ""


def test_pause_is_logged_counted_and_ended_by_the_next_message(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reporter.set_phase("training")
    reporter.on_trainer_message(PauseChanged(reason="others use 60% of the processors"))
    assert reporter.status().describe_contributing() == "no: paused, others use 60% of the processors"
    reporter.on_trainer_message(PauseChanged(reason=""))
    assert reporter.status().paused == ""
    reporter.on_trainer_message(PauseChanged(reason="again"))
    reporter.on_trainer_message(Ready(device="cpu", step=0, round=0, outstanding=None))
    assert reporter.status().paused == "", "a restarted trainer checks for other programs itself"
    assert reporter._metrics.pauses == 2
    assert caplog.messages[:2] == ["training paused: others use 60% of the processors", "training resumed"]


def test_log_of_skipped_rounds_gives_no_contribution_count(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reporter.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert "round 3: 1 contribution, ours not among them" in caplog.text
    caplog.clear()
    reporter.record_rounds(HEAD, bytes(32), [], "none")
    reporter.record_rounds(HEAD, bytes(32), commits(2), "included")
    assert "contributions" not in caplog.text and caplog.text.count("round 3: downloaded") == 2


def test_phases_are_logged_once(reporter: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reporter.set_phase("catching up", "others are ahead")
    reporter.set_phase("catching up", "others are ahead")
    assert caplog.messages == ["catching up: others are ahead"]
    assert (reporter.status().phase, reporter.status().reason) == ("catching up", "others are ahead")
    reporter.set_phase("training")
    assert reporter.status().reason == ""


def test_included_contribution_updates_status_and_counters(reporter: StatusReporter) -> None:
    reporter.record_rounds(HEAD, bytes(32), commits(1), "included")
    status = reporter.status()
    assert (status.round, status.chain_tokens, status.digest) == (3, 900, HEAD.digest.hex())
    assert (status.contributions_included, status.last_included_round) == (1, 2)
    assert reporter._metrics.rounds == {"included": 1}


def test_excluded_and_missed_rounds_are_counted_with_their_reasons(reporter: StatusReporter) -> None:
    reporter.record_rounds(HEAD, bytes(32), commits(1), "excluded")
    reporter.record_rounds(HEAD, bytes(32), commits(3), "none")
    reporter.record_rounds(HEAD, bytes(32), commits(3), "included")
    reporter.record_rounds(HEAD, bytes(32), [], "none")
    reporter.set_miss_reason("the state differed")
    assert reporter._metrics.rounds == {"excluded": 1, "missed": 5, "included": 1}
    assert reporter.status().absence == "the state differed" and reporter.status().contributions_excluded == 1
    assert reporter._metrics.missed_rounds == {"excluded": 1, "catching up": 5}, "each missed round has its reason"


def test_last_included_round_is_the_one_with_our_contribution_among_several(reporter: StatusReporter) -> None:
    reporter._status = reporter._status.model_copy(update={"peer_id": PEERS[1].peer_id})
    ours = commit_of(ChainHead(0, bytes(32), 0), {1: Blob.of(b"x")}).body
    others = [commit_of(ChainHead(number, bytes(32), 0), {2: Blob.of(b"x")}).body for number in range(1, 10)]
    reporter.record_rounds(ChainHead(10, bytes(32), 900), bytes(32), [ours, *others], "included")
    reporter.set_phase("training")
    why = "no, not in the last 9 rounds: the round was decided before this node had caught up"
    assert reporter.status().last_included_round == 0 and reporter.status().describe_contributing() == why


def test_last_included_round_of_another_chain_is_forgotten(reporter: StatusReporter) -> None:
    reporter.record_rounds(ChainHead(200, bytes(32), 10_000), bytes(32), commits(1), "included")
    assert reporter.status().describe_contributing() == "no: starting"
    reporter.set_phase("training")
    assert reporter.status().describe_contributing() == "yes"
    reporter.record_rounds(ChainHead(50, bytes(32), 20_000), bytes(32), commits(2), "none")
    assert reporter.status().last_included_round is None
    assert reporter.status().describe_contributing() == "no: the round was decided before this node had caught up"


def test_speed_is_zero_while_the_trainer_is_paused_or_dead(reporter: StatusReporter) -> None:
    reporter.on_trainer_message(TrainerProgress(step=7, tokens=70, loss=2.5, tokens_per_second=9.0, seconds={}))
    reporter.on_trainer_message(PauseChanged(reason="others use the processors"))
    assert reporter.status().tokens_per_second == 0
    reporter.on_trainer_message(PauseChanged(reason=""))
    assert reporter.status().tokens_per_second == 9
    reporter.add_source(Fields(trainer_trouble="it died"))
    assert reporter.status().tokens_per_second == 0


def test_stall_is_reported_when_no_round_is_decided() -> None:
    now = [100.0]
    reporter = StatusReporter(NodeStatus(peer_id="me", run="small", run_id="00" * 32), Metrics(), lambda: now[0])

    def round_after(seconds: float, phase: Phase = "training") -> str:
        reporter.set_phase(phase)
        now[0] += seconds
        stall = reporter.status().standstill
        reporter.record_rounds(HEAD, bytes(32), commits(1), "included")
        return stall

    assert [round_after(seconds) for seconds in (9000, 30, 40, 30)] == 4 * [""], (
        "there is no duration to compare the first with"
    )
    assert round_after(150) == ""
    assert round_after(900) == "no round was decided for 15 min; recent rounds took at most 150 s"
    assert round_after(3600) == "", "now rounds of that length are usual"
    reporter.set_phase("training")
    now[0] += 6 * 3600
    assert reporter.status().describe_contributing().startswith("no: no round was decided for 360 min")
    assert round_after(1, "catching up").startswith("no round")
    assert round_after(9000) == "", "replayed rounds have no duration"


def test_trainer_warning_is_counted_and_logged(reporter: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    reporter.on_trainer_message(TrainerWarning(reason="step skipped", line="the loss of inner step 3 is not finite"))
    assert reporter.status().setbacks == {"step skipped": 1}
    assert caplog.messages == ["step skipped: the loss of inner step 3 is not finite"]


def test_skipped_rows_are_counted_and_each_line_is_logged_once(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.on_trainer_message(RowsSkipped(counts={"null": 2, "too long": 1}, lines=("skipped a row 3: no text",)))
    reporter.on_trainer_message(RowsSkipped(counts={"null": 3}, lines=()))
    status = reporter.status()
    assert status.skipped_rows == {"null": 5, "too long": 1}
    assert status.reason_lines() == ("skipped rows: null 5, too long 1",)
    assert caplog.messages == ["data: skipped a row 3: no text"]


def test_reject_reason_is_reported_until_our_contribution_is_included(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reporter.set_phase("training")
    reporter.on_trainer_message(MESSAGE)
    reporter.record_rejected("me", "left out")
    reporter.record_rejected("me", "late")  # a consequence of the first
    reporter.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert "ours not among them (left out)" in caplog.messages[-1]
    reporter.set_phase("training")
    assert "too few peers received our contribution in time" in reporter.status().describe_contributing()
    reporter.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert reporter._metrics.missed_rounds == {"left out": 1, "late": 1}, (
        "it is still pending, and the round did not reject it"
    )
    reporter.record_rounds(HEAD, bytes(32), commits(1), "included")
    assert reporter.status().describe_contributing() == "yes"
    reporter.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert reporter._metrics.missed_rounds["slow"] == 1, "no contribution was pending"


def test_rejection_of_another_peer_is_not_our_reason(reporter: StatusReporter) -> None:
    """Control: only our own rejection counts."""
    reporter.set_phase("training")
    reporter.record_rejected("them", "left out")
    reporter.record_rounds(HEAD, bytes(32), commits(1), "none")
    assert reporter._metrics.missed_rounds == {"slow": 1}


def test_catch_ups_are_counted_by_method(reporter: StatusReporter) -> None:
    reporter.record_catch_up("replayed", 1)
    reporter.record_catch_up("replayed", 1)
    reporter.record_catch_up("skipped", 30)
    assert reporter._metrics.catch_ups == {"replayed": 2, "skipped": 30}


def test_changed_outcome_on_another_chain_is_counted_and_logged(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    message = ContributionHeader(round=7, sizes=(4,), tokens=100, steps=5, loss=3.0)
    reporter.record_revised([SettledContribution(StoredContribution(message, ()), 7, "excluded", "included")])
    assert reporter._metrics.revisions == {"excluded": 1}
    assert "the contribution of round 7: excluded" in caplog.text


def test_applied_contributions_are_counted_and_logged(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    parts = (Blob.of(b"four"), Blob.of(b"of six"))
    both = commit_of(HEAD, {0: parts, 1: parts[:1]}).body.contributions
    reporter.record_applied(AppliedContributions.of(both), 1.0)
    reporter.record_applied(AppliedContributions.of(()), 0.25)
    assert reporter._metrics.applied == {"contributions": 2, "parts": 3, "bytes": 14}
    assert reporter._metrics.outer_steps == 1.25
    assert caplog.messages == [
        "applied 2 contributions, 3 parts of 14 B", "applied 0 contributions, 0 parts of 0 B, 0.25 of an outer step",
    ]  # fmt: skip


def test_recovered_errors_are_counted_and_logged(reporter: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reporter.record_recovered("not delivered", "gave up 3 messages")
    reporter.record_recovered("blob missing", "round 3 goes on")
    assert reporter.status().setbacks == {"not delivered": 1, "blob missing": 1}
    logged = [(record.levelno, record.getMessage()) for record in caplog.records]
    lines = "not delivered: gave up 3 messages", "blob missing: round 3 goes on"
    assert logged == [(logging.DEBUG, lines[0]), (logging.WARNING, lines[1])]


def test_faults_of_one_call_are_counted_and_logged_in_one_line(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.record_refusal(
        "them", ForgedError("a wrong signature"), MalformedError("nonsense"), ForgedError("another")
    )
    assert reporter.status().refusals == {"forged": 2, "malformed": 1}
    assert caplog.messages == ["refused what them sent (forged): a wrong signature (and 2 more)"]


def test_refusals_are_counted_and_logged(reporter: StatusReporter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reporter.record_refusal("them", ForgedError("not theirs"))
    reporter.record_rejected("them", "late")
    reporter.record_rejected(None, "leader silent")
    for counts in ({"forged": 2}, {"dht": 0}):
        reporter._metrics.add_refusal_counter(SimpleNamespace(refusals=counts))
    assert reporter.status().refusals == {"forged": 3, "late": 1, "leader silent": 1}
    assert caplog.messages == [
        "refused what them sent (forged): not theirs", "late: them", "leader silent: this round"
    ]  # fmt: skip


def head_after(rounds: int) -> ChainHead:
    return ChainHead(rounds, bytes([rounds]) * 32, 100 * rounds)


def test_peer_that_is_back_says_in_one_line_what_became_of_its_work(caplog: pytest.LogCaptureFixture) -> None:
    me = NodeStatus(peer_id=PEERS[1].peer_id, run="demo", run_id="0")
    reporter = StatusReporter(me, Metrics())
    caplog.set_level(logging.INFO)
    reporter.set_head(head_after(30), bytes(32))
    reporter.set_phase("catching up", "others are ahead")
    caplog.clear()
    skipped = [commit_of(ChainHead(number, bytes(32), 0), {1: Blob.of(b"x")}).body for number in range(39, 42)]
    message = ContributionHeader(round=28, sizes=(4,), tokens=100, steps=5, loss=3.0)
    reporter.record_revised([SettledContribution(StoredContribution(message, ()), 28, "excluded", "included")])
    reporter.record_rounds(head_after(42), bytes(32), skipped, "included")
    assert not caplog.messages, "the rounds have no lines of their own"
    reporter.set_phase("training")
    assert caplog.messages == [
        "back after 12 rounds: 1 contribution included in round 40, 1 given back; later ones carry their work"
    ]


def test_one_round_that_is_replayed_has_its_usual_line(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.set_head(head_after(30), bytes(32))
    reporter.set_phase("training")
    caplog.set_level(logging.INFO)
    reporter.set_phase("catching up", "others are ahead")
    reporter.record_rounds(head_after(31), bytes(32), commits(1), "none")
    reporter.set_phase("training")
    assert caplog.messages == ["round 31: 1 contribution, ours not among them (catching up)"]


def test_round_is_one_line_with_the_newest_validation_once(
    reporter: StatusReporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.set_phase("training")
    reporter.set_head(head_after(2), bytes(32))
    reporter.on_trainer_message(Evaluated(round=2, loss=2.5, tokens=10))
    caplog.set_level(logging.INFO)
    for rounds in (3, 4):
        reporter.set_phase("exchanging")
        reporter.record_applied(AppliedContributions.of(()), 1.0)
        reporter.record_rounds(head_after(rounds), bytes(32), commits(1), "included")
        reporter.set_phase("training")
    assert caplog.messages == [
        "round 3: 1 contribution, ours included, validation 2.500 after round 2 (shared model)",
        "round 4: 1 contribution, ours included",
    ]  # fmt: skip

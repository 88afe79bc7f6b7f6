"""Convicted peers are excluded, also after a restart, and those with a strike count again once they are cleared."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.daemon.checkpoints.vote_log import ConvictionFile
from node.loop.actions import SaveProofs
from protocol.audit_tracker import AuditTracker
from protocol.audits import Verdict
from protocol.conduct import Conduct, PeerConvicted
from tests.node.loop.loop_under_test import ME as LOOP
from tests.node.loop.loop_under_test import LoopUnderTest
from tests.node.small_run import PEERS, RUN_ID, TERMS
from tests.protocol.audits.panel import audits_of, finding_of

ME, LIAR = PEERS[0].peer_id, PEERS[1].peer_id
# Four of its five auditors convict.
AUDIT = next(each for each in audits_of() if LOOP not in (each.contribution.sender, each.auditors[0]))
AUDITED, ACCUSER = AUDIT.contribution.sender, AUDIT.auditors[0]


def convicted(*verdicts: Verdict) -> PeerConvicted:
    """Return the conviction by the verdicts of the auditors in their order."""
    tracker = AuditTracker(AUDIT.auditors[4])
    tracker.open(0, [AUDIT])
    found = [each for place, word in enumerate(verdicts) for each in tracker.learn(finding_of(AUDIT, place, word))]
    return next(each for each in found if isinstance(each, PeerConvicted))


LAZY = convicted("different", "different", "different", "different")
FALSE = convicted("different", "equal", "equal", "equal")


def file_in(folder: Path) -> ConvictionFile:
    return ConvictionFile(folder / "convictions.json", RUN_ID, TERMS)


def test_convicted_peer_is_excluded_and_the_reason_is_shown() -> None:
    conduct = Conduct(AUDIT.auditors[4])
    assert conduct.convict(LAZY) and not conduct.convict(LAZY)
    assert conduct.excluded == {AUDITED}
    assert conduct.describe(1, []) == [f"excluded: {AUDITED}: two thirds of the voters contradict its work in round 1"]
    own = Conduct(AUDITED)
    assert not own.convict(LAZY) and not own.excluded


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "control"])
def test_conviction_outlives_a_restart(tmp_path: Path, is_kept: bool) -> None:
    """The control: a loop without the file, as before, forgets it."""
    before = LoopUnderTest()
    before.start()
    before.loop.conduct.convict(FALSE)
    (saved,) = [action for action in before.pass_time(1.0) if isinstance(action, SaveProofs)]
    file_in(tmp_path).save(saved.convictions)
    restarted = LoopUnderTest(convictions=tuple(file_in(tmp_path).load()) if is_kept else ())
    restarted.start()
    assert restarted.loop.conduct.excluded == ({ACCUSER} if is_kept else frozenset())
    assert bool(restarted.loop.conduct.conduct.describe(1, [])) == is_kept


def test_file_shows_the_signed_findings_and_knows_nothing_before_the_first(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.save(())
    assert file.load() == [] and not (tmp_path / "convictions.json").exists()
    file.save((LAZY, FALSE))
    assert file.load() == [LAZY, FALSE]


def _drop_a_finding(entry: dict[str, Any]) -> None:
    entry["findings"].pop()


def _name_another_peer(entry: dict[str, Any]) -> None:
    entry["peers"] = [LIAR if LIAR not in entry["peers"] else ME]


def _name_more_voters(entry: dict[str, Any]) -> None:
    entry["voters"] += ["first", "second", "third"]


def _repeat_a_finding(entry: dict[str, Any]) -> None:
    entry["findings"][-1] = entry["findings"][0]


def _break_a_signature(entry: dict[str, Any]) -> None:
    entry["findings"][0] = entry["findings"][0][:-2] + "00"


def _call_it_by_another_name(entry: dict[str, Any]) -> None:
    entry["offence"] = "audit: doubted"


@pytest.mark.parametrize(
    "change",
    [
        _drop_a_finding,
        _name_another_peer,
        _name_more_voters,
        _repeat_a_finding,
        _break_a_signature,
        _call_it_by_another_name,
    ],
)
@pytest.mark.parametrize("conviction", [LAZY, FALSE], ids=["lazy", "false"])
def test_conviction_without_the_findings_of_two_thirds_is_not_loaded(
    tmp_path: Path, conviction: PeerConvicted, change: Callable[[dict[str, Any]], None]
) -> None:
    file, path = file_in(tmp_path), tmp_path / "convictions.json"
    file.save((conviction,))
    entries = json.loads(path.read_text())
    change(entries[0])
    path.write_text(json.dumps(entries))
    assert file.load() == []


@pytest.mark.parametrize("damage", ["", "{", "7", '["x"]', '[{"peers": 1}]', "null"])
def test_damaged_file_has_no_convictions(tmp_path: Path, damage: str) -> None:
    (tmp_path / "convictions.json").write_text(damage)
    assert file_in(tmp_path).load() == []


def test_conviction_of_another_contribution_proves_nothing(tmp_path: Path) -> None:
    file_in(tmp_path).save(
        (replace(LAZY, contribution=next(each for each in audits_of() if each.key != AUDIT.key).contribution.signed),)
    )
    assert file_in(tmp_path).load() == []


def test_peer_that_is_cleared_is_waited_for_again() -> None:
    conduct, others = Conduct(ME), [peer.peer_id for peer in PEERS[:4]]
    conduct.strike(LIAR, 0, "audit: doubted")
    assert conduct.serving.struck(1, others) == {LIAR: "audit: doubted"} and not conduct.excluded
    conduct.clear(LIAR)
    assert conduct.serving.struck(1, others) == {}

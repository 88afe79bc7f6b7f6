"""`murmur runs`: the peers that it asks, the announcements that it drops, and its output."""

import json
import logging
from pathlib import Path

import pytest

from node.commands.join import public_runs
from node.commands.join.public_runs import (
    AnnouncedRuns,
    add_announcement,
    describe_run,
    format_progress,
    packaged_peers,
    peers_to_query,
    show_runs,
)
from protocol.errors import UnreachableError, UsageError
from protocol.identity import Identity
from protocol.membership.contacts import save_addresses
from protocol.membership.rendezvous import LIFETIME_SECONDS, make_run_announcement
from protocol.signing import fingerprint
from tests.protocol.membership.test_run_registry import HOSTILE, NOW, ORGANISER, RUN, run_of, sign_unchecked

PEERS = [Identity.create().peer_id for _ in range(3)]
ADDRESSES = [f"/ip4/203.0.113.{number}/tcp/4001/p2p/{peer}" for number, peer in enumerate(PEERS)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "murmur"


def test_named_peers_are_asked_before_known_peers(home: Path) -> None:
    (home / "demo-1a2b").mkdir(parents=True)
    save_addresses(home / "demo-1a2b" / "peers.json", {PEERS[1]: ADDRESSES[1:2]})
    assert list(peers_to_query([ADDRESSES[0]]).items()) == [(PEERS[0], (ADDRESSES[0],)), (PEERS[1], (ADDRESSES[1],))]
    assert list(peers_to_query([])) == [PEERS[1]]


def test_missing_peers_are_reported() -> None:
    assert packaged_peers() == ()
    with pytest.raises(UsageError, match="no peer to ask: .* list of public peers is empty; name any peer"):
        peers_to_query([])
    with pytest.raises(UsageError, match="--peer: .*/p2p/"):
        peers_to_query(["/ip4/203.0.113.1/tcp/4001"])


def test_packaged_peers_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.toml").write_text(f"peers = {json.dumps(ADDRESSES[2:])}\n")
    monkeypatch.setattr(public_runs, "bootstrap_file", lambda: tmp_path / "list.toml")
    assert list(peers_to_query([])) == [PEERS[2]]


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_invalid_announcements_are_dropped_and_logged(hostile: object, caplog: pytest.LogCaptureFixture) -> None:
    """Control: a valid announcement is kept."""
    runs = AnnouncedRuns()
    add_announcement(runs, sign_unchecked(hostile), NOW)  # type: ignore[arg-type]
    assert runs == {} and "dropped the announcement" in caplog.text
    add_announcement(runs, sign_unchecked(run_of()), NOW)
    assert [run.name for run in runs.values()] == ["demo"]


def test_expired_announcement_is_dropped_and_newest_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runs = AnnouncedRuns()
    add_announcement(runs, sign_unchecked(run_of(round=9), expires=NOW - 1), NOW)
    assert runs == {} and "expires in -1 s" in caplog.text
    for number, when in ((2, NOW + 1), (3, NOW + 2), (1, NOW)):
        add_announcement(runs, make_run_announcement(ORGANISER, run_of(round=number), when).value, NOW)
    assert [run.round for run in runs.values()] == [3]
    add_announcement(runs, make_run_announcement(Identity.create(), run_of(round=7), NOW).value, NOW)
    assert len(runs) == 2, "another organiser says something else of the same run: both are shown, each with its key"
    add_announcement(runs, make_run_announcement(ORGANISER, run_of(), NOW).value, NOW + LIFETIME_SECONDS + 1)
    assert len(runs) == 2


def test_fields_of_a_run() -> None:
    row = describe_run(ORGANISER.peer_id, run_of())
    assert (
        row["fingerprint"] == fingerprint(ORGANISER.peer_id) and row["run_id"] == RUN and row["target_tokens"] is None
    )
    assert format_progress(row) == "round 30 of 400"
    assert format_progress(describe_run(ORGANISER.peer_id, run_of(target_rounds=0))) == "round 30"
    assert (
        format_progress(describe_run(ORGANISER.peer_id, run_of(target_rounds=0, tokens=10**6, target_tokens=10**9)))
        == "1.0M of 1.0G tokens"
    )


def test_join_command_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def seen(_: object) -> tuple[AnnouncedRuns, int]:
        return {(ORGANISER.peer_id, bytes(32)): run_of()}, 1

    monkeypatch.setattr(public_runs, "search_runs", seen)
    show_runs([ADDRESSES[0]], False)
    shown = capsys.readouterr().out
    assert "round 30 of 400" in " ".join(shown.split()) and f"murmur join {run_of().link}" in shown.splitlines()


def test_unreachable_peers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreachableError, match="none of 1 peers answers; name another"):
        show_runs([f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[0]}"], True)

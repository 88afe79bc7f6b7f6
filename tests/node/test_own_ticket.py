"""What a node needs to be admitted, and what it says where that is missing."""

import time
from pathlib import Path
from typing import Any

import pytest

from node.commands.tickets import TicketOptions, parse_end, run_tickets
from node.own_ticket import load_own_ticket, require_admission
from node.run_dir import RunDir
from protocol.admission import Ticket, issue_ticket, ticket_from_text, ticket_to_text
from protocol.errors import AdmissionError, MissingFileError, OrganiserError, UsageError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.steering import REFERENCE_MANIFEST

ORGANISER = Identity.create()


def manifest_of(**admission: object) -> Manifest:
    tables = REFERENCE_MANIFEST.model_dump()
    tables["run"]["organiser_key"], tables["admission"] = ORGANISER.peer_id, admission
    return Manifest.model_validate(tables)


RUN = manifest_of(mode="tickets")


def ticket_file(folder: Path, key: str, until: float, signer: Identity = ORGANISER) -> Path:
    path = folder / "given"
    path.write_text(ticket_to_text(issue_ticket(signer, RUN.run_id, Ticket(key, until))))
    return path


def test_join_says_what_it_lacks_and_keeps_a_given_ticket(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "node")
    with pytest.raises(AdmissionError, match="send your key 12D3KooW.* to its organiser.*--ticket FILE") as fault:
        require_admission(RUN, run_dir, None)
    assert fault.value.exit_code == 17 and "\n" not in str(fault.value)
    me = Identity.load_or_create(run_dir.key).peer_id
    assert me in str(fault.value)
    require_admission(RUN, run_dir, ticket_file(tmp_path, me, time.time() + 100))
    (tmp_path / "given").unlink()
    require_admission(RUN, run_dir, None)
    kept = load_own_ticket(RUN, run_dir, me)
    assert kept is not None and kept.body.key == me


def test_ticket_that_does_not_hold_is_named(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "node")
    run_dir.path.mkdir()
    me, now = Identity.load_or_create(run_dir.key).peer_id, time.time()
    for until, signer, key, reason in (
        (now - 1, ORGANISER, me, "ended at"),
        (now + 9, Identity.create(), me, "organiser"),
        (now + 9, ORGANISER, Identity.create().peer_id, "is for the key"),
    ):
        with pytest.raises(AdmissionError, match=reason):
            require_admission(RUN, run_dir, ticket_file(tmp_path, key, until, signer))
    (tmp_path / "given").write_bytes(b"\xff" * 10_000)
    with pytest.raises(AdmissionError, match="not a ticket"):
        require_admission(RUN, run_dir, tmp_path / "given")
    with pytest.raises(MissingFileError):
        require_admission(RUN, run_dir, tmp_path / "nothing")
    assert not run_dir.ticket.exists()


def test_key_that_is_not_on_the_list_is_told_to_whom_to_send_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "node")
    run_dir.path.mkdir()
    me = Identity.load_or_create(run_dir.key).peer_id
    with pytest.raises(AdmissionError, match=me):
        require_admission(manifest_of(mode="list", keys=(ORGANISER.peer_id,)), run_dir, None)
    require_admission(manifest_of(mode="list", keys=(me,)), run_dir, None)
    require_admission(manifest_of(), run_dir, None)


def test_organiser_issues_and_lists_tickets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    organiser = Identity.load_or_create(tmp_path / "organiser.key")
    tables = REFERENCE_MANIFEST.model_dump()
    tables["run"]["organiser_key"], tables["admission"] = organiser.peer_id, {"mode": "tickets"}
    manifest, file = Manifest.model_validate(tables), tmp_path / "run.toml"
    file.write_text(manifest.to_toml())
    holder = Identity.create().peer_id
    common: dict[str, Any] = {"run": str(file), "key": tmp_path / "organiser.key"}
    run_tickets(TicketOptions(**common, holder=holder, note="mary"))
    signed = ticket_from_text(capsys.readouterr().out)
    assert signed.peer == organiser.peer_id
    run_tickets(TicketOptions(**common, holder=holder, note="mary", out=tmp_path / "mary.ticket"))
    assert ticket_from_text((tmp_path / "mary.ticket").read_text()).peer == organiser.peer_id
    capsys.readouterr()
    run_tickets(TicketOptions(**common))
    listed = capsys.readouterr().out
    assert holder in listed and "valid, mary" in listed and "1 tickets" in listed
    with pytest.raises(UsageError, match="murmur key"):
        run_tickets(TicketOptions(**common, holder="mary"))
    Identity.load_or_create(tmp_path / "other.key")
    with pytest.raises(OrganiserError):
        run_tickets(TicketOptions(run=str(file), key=tmp_path / "other.key", holder=holder))


def test_ends_are_spans_or_dates() -> None:
    assert parse_end("2d", 100.0) == 100.0 + 2 * 86400 and parse_end("3h", 0.0) == 3 * 3600
    assert parse_end("2027-01-31", 0.0) == 1801353600.0
    for text in ("soon", "-1d", "2001-01-01", "99999999d", ""):
        with pytest.raises(UsageError):
            parse_end(text, 1e9)

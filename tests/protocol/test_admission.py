"""Tickets: who signs them, for whom, and until when; and the gate that asks for them."""

import pytest

from protocol import murmur_pb2 as wire
from protocol.admission import (
    CLOCK_MARGIN_SECONDS,
    TEXT_PREFIX,
    AdmissionPolicy,
    Ticket,
    issue_ticket,
    open_ticket,
    ticket_from_text,
    ticket_to_text,
)
from protocol.errors import ForgedError, MalformedError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.signing import sign
from protocol.steering import REFERENCE_MANIFEST

ORGANISER, HOLDER, OTHER = (Identity.create() for _ in range(3))
NOW = 1_800_000_000.0
TICKET = Ticket(HOLDER.peer_id, NOW + 1000, "mary")


def manifest_of(**admission: object) -> Manifest:
    tables = REFERENCE_MANIFEST.model_dump()
    tables["run"]["organiser_key"], tables["admission"] = ORGANISER.peer_id, admission
    return Manifest.model_validate(tables)


RUN = manifest_of(mode="tickets")


def shown(ticket: Ticket = TICKET, signer: Identity = ORGANISER, run_id: str = RUN.run_id) -> bytes:
    return issue_ticket(signer, run_id, ticket).SerializeToString(deterministic=True)


def test_ticket_is_verified_offline_and_survives_a_mail() -> None:
    signed = issue_ticket(ORGANISER, RUN.run_id, TICKET)
    text = ticket_to_text(signed)
    assert "\n" not in text and ticket_from_text(f"  {text}\n") == signed
    assert open_ticket(ticket_from_text(text), RUN.run_id, ORGANISER.peer_id) == TICKET


def test_ticket_of_another_signer_run_or_kind_is_refused() -> None:
    with pytest.raises(ForgedError):
        open_ticket(issue_ticket(OTHER, RUN.run_id, TICKET), RUN.run_id, ORGANISER.peer_id)
    with pytest.raises(ForgedError):
        open_ticket(issue_ticket(ORGANISER, "00" * 32, TICKET), RUN.run_id, ORGANISER.peer_id)
    with pytest.raises(MalformedError):
        open_ticket(sign(ORGANISER, "revision", RUN.run_id, TICKET.to_wire()), RUN.run_id, ORGANISER.peer_id)
    with pytest.raises(ForgedError):
        open_ticket(issue_ticket(ORGANISER, RUN.run_id, TICKET), RUN.run_id, "")
    longer = issue_ticket(ORGANISER, RUN.run_id, TICKET)
    longer.body = Ticket(HOLDER.peer_id, NOW * 2, "mary").to_wire().SerializeToString(deterministic=True)
    with pytest.raises(ForgedError):
        open_ticket(longer, RUN.run_id, ORGANISER.peer_id)


@pytest.mark.parametrize(
    "body",
    [
        wire.Ticket(key="mary", until=NOW), wire.Ticket(key=HOLDER.peer_id, until=-1.0),
        wire.Ticket(key=HOLDER.peer_id, until=float("nan")), wire.Ticket(key=HOLDER.peer_id, until=float("inf")),
        wire.Ticket(key=HOLDER.peer_id, until=NOW, note="a\x1bb"),
        wire.Ticket(key=HOLDER.peer_id, until=NOW, note="x" * 65),
    ],
)  # fmt: skip
def test_malformed_ticket_is_refused(body: wire.Ticket) -> None:
    with pytest.raises(MalformedError):
        open_ticket(sign(ORGANISER, "ticket", RUN.run_id, body), RUN.run_id, ORGANISER.peer_id)


@pytest.mark.parametrize("text", ["", "mary", TEXT_PREFIX + "!!", TEXT_PREFIX + "AAAA", TEXT_PREFIX + "A" * 9000])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        ticket_from_text(text)


def test_gate_admits_a_holder_until_its_ticket_ends_and_counts_refusals_once() -> None:
    gate = AdmissionPolicy(RUN)
    assert gate.admits(HOLDER.peer_id, shown(), NOW) and not gate.refusals
    assert gate.admits(HOLDER.peer_id, shown(), TICKET.until + CLOCK_MARGIN_SECONDS)
    for _ in range(5):
        assert not gate.admits(HOLDER.peer_id, shown(), TICKET.until + CLOCK_MARGIN_SECONDS + 1)
        assert not gate.admits(OTHER.peer_id, b"", NOW)
    assert dict(gate.refusals) == {"ticket expired": 1, "no ticket": 1}


@pytest.mark.parametrize("ticket", [b"", b"\xff", shown(signer=OTHER), shown(run_id="00" * 32), shown()])
def test_gate_refuses_every_other_key(ticket: bytes) -> None:
    assert not AdmissionPolicy(RUN).admits(OTHER.peer_id, ticket, NOW), "also with the ticket of somebody else"


def test_ticket_that_is_renewed_counts() -> None:
    gate = AdmissionPolicy(RUN)
    assert not gate.admits(HOLDER.peer_id, shown(Ticket(HOLDER.peer_id, NOW - 9999)), NOW)
    assert gate.admits(HOLDER.peer_id, shown(), NOW)


@pytest.mark.parametrize("mode", ["open", "list", "tickets"])
def test_revoked_key_is_refused_in_every_mode(mode: str) -> None:
    keys = {"keys": (HOLDER.peer_id,)} if mode == "list" else {}
    manifest = manifest_of(mode=mode, **keys)
    gate = AdmissionPolicy(manifest)
    ticket = shown(run_id=manifest.run_id)
    assert gate.admits(HOLDER.peer_id, ticket, NOW)
    gate.revoked = frozenset([HOLDER.peer_id])
    assert not gate.admits(HOLDER.peer_id, ticket, NOW) and gate.refusals["revoked"] == 1


def test_list_admits_its_keys_and_open_runs_admit_all() -> None:
    assert AdmissionPolicy(manifest_of()).admits(OTHER.peer_id, b"", NOW), "the control"
    gate = AdmissionPolicy(manifest_of(mode="list", keys=(HOLDER.peer_id,)))
    assert gate.admits(HOLDER.peer_id, b"", NOW) and not gate.admits(OTHER.peer_id, b"", NOW)
    assert dict(gate.refusals) == {"not on the list": 1}

"""`murmur ticket`: issue, list and revoke the tickets of a run as its organiser, and vouch for its hosts.

A list of the issued tickets is kept next to the organiser's key. Tickets need no connection: they are verified offline.
A revocation is a revision of the manifest (`admission.revoked`), which the next commit adopts.
"""

import asyncio
import json
import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from node.commands.steer import (
    SteerOptions,
    choose_round,
    load_organiser_key,
    open_run,
    require_organiser_key,
    sign_revision,
    state_of,
)
from node.daemon.steering.client import contact_run
from node.paths import state_home
from node.run_dir import read_json_if_whole, write_atomically
from protocol.admission import MAX_NOTE_CHARACTERS, Ticket, issue_ticket, ticket_to_text
from protocol.electorate import REVOKED_KEY
from protocol.errors import MalformedError, StorageError, UnreachableError, UsageError
from protocol.identity import Identity, public_key
from protocol.manifest.run import Manifest
from protocol.signing import Voucher

DEFAULT_END = "30d"
SPAN = re.compile(r"^([0-9]{1,5})([hd])\Z")
SECONDS = {"h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class TicketOptions:
    """The command line of `murmur ticket`. Without a key it lists the tickets."""

    run: str
    holder: str = ""
    until: str = DEFAULT_END
    note: str = ""
    out: Path | None = None
    revoke: bool = False
    host: bool = False
    key: Path | None = None
    insecure: bool = False


def run_tickets(options: TicketOptions) -> None:
    """Issue or revoke a ticket, or list those that were issued. Raises MurmurError."""
    manifest, addresses = open_run(options.run, options.insecure)
    require_organiser_key(manifest)
    if options.host and (options.revoke or not options.holder):
        raise UsageError("--host needs the KEY of a host, without --revoke; `murmur key DIR --create` shows it")
    if not options.holder:
        _print_issued(manifest)
        return
    try:
        public_key(options.holder)
    except MalformedError as error:
        raise UsageError(f"{error}; `murmur key DIR` shows the key of a node") from error
    identity = load_organiser_key(options.key, manifest)
    if options.host:
        _vouch(manifest, identity, options)
    elif options.revoke:
        asyncio.run(_revoke(manifest, addresses, identity, options))
    else:
        _issue(manifest, identity, options)


def parse_end(text: str, now: float) -> float:
    """Return the end of a ticket: a span such as 30d or 12h, or a date. Raises UsageError."""
    if match := SPAN.match(text):
        return now + int(match[1]) * SECONDS[match[2]]
    try:
        until = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"--until {text!r}: write a span such as 30d or 12h, or a date such as 2027-01-31") from error
    end = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(end) or end <= now:
        raise UsageError(f"--until {text} is over; name a later date")
    return end


def _issue(manifest: Manifest, identity: Identity, options: TicketOptions) -> None:
    if manifest.admission.mode != "tickets":
        raise UsageError('the run admits keys without tickets; its manifest needs [admission] mode = "tickets"')
    if len(options.note) > MAX_NOTE_CHARACTERS or not options.note.isprintable():
        raise UsageError(f"--note is one line of at most {MAX_NOTE_CHARACTERS} characters")
    ticket = Ticket(options.holder, parse_end(options.until, time.time()), options.note)
    text = ticket_to_text(issue_ticket(identity, manifest.run_id, ticket))
    _record(manifest, ticket, is_revoked=False)
    if options.out is None:
        print(text)
        return
    _write(options.out, text + "\n")
    print(f"{options.out}: a ticket for {ticket.key} until {_day(ticket.until)}; its holder joins with --ticket FILE")


def _vouch(manifest: Manifest, identity: Identity, options: TicketOptions) -> None:
    """Print or write the voucher for a host."""
    voucher = Voucher.issue(identity, manifest.run_id, options.holder)
    if options.out is None:
        print(voucher)
        return
    _write(options.out, f"{voucher}\n")
    print(f"{options.out}: a voucher for the host {options.holder}, which saves it as the file voucher in its folder")


async def _revoke(manifest: Manifest, addresses: tuple[str, ...], identity: Identity, options: TicketOptions) -> None:
    async with contact_run(manifest, addresses) as contact:
        state = state_of(contact, contact.round)
        keys = sorted({*state.manifest.admission.revoked, options.holder})
        from_round = choose_round(SteerOptions(run=options.run), contact, state)
        revision = sign_revision(contact, identity, from_round, {REVOKED_KEY: keys})
        reached = await contact.publish([*contact.revisions, revision])
    if not reached:
        raise UnreachableError("no peer took the revocation; try again")
    _record(manifest, Ticket(options.holder, 1.0), is_revoked=True)
    print(f"revoked {options.holder}; the next commit of the run adopts it")


def _ledger_path(manifest: Manifest) -> Path:
    return state_home() / "tickets" / f"{manifest.run_id}.json"


def _issued(manifest: Manifest) -> dict[str, Any]:
    return dict(read_json_if_whole(_ledger_path(manifest)))


def _record(manifest: Manifest, ticket: Ticket, *, is_revoked: bool) -> None:
    issued = _issued(manifest)
    known = issued.get(ticket.key, {"until": ticket.until, "note": ticket.note})
    entry = known if is_revoked else {"until": ticket.until, "note": ticket.note}
    _write(_ledger_path(manifest), json.dumps(issued | {ticket.key: entry | {"revoked": is_revoked}}, indent=1))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; free some space or name another file") from error
    write_atomically(path, text.encode())


def _print_issued(manifest: Manifest) -> None:
    issued, now = _issued(manifest), time.time()
    for key, entry in sorted(issued.items(), key=lambda item: str(item[1]["until"])):
        words = "revoked" if entry["revoked"] else "expired" if entry["until"] < now else "valid"
        print(f"{key} until {_day(entry['until'])}, {words}{', ' + entry['note'] if entry['note'] else ''}")
    print(f"{len(issued)} tickets of the run {manifest.run.name}")


def _day(until: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))

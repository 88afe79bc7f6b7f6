"""The ticket of this node: a file in its folder, given once with `murmur join --ticket FILE`."""

import time
from pathlib import Path

from node.run_dir import RunDir
from protocol import murmur_pb2 as wire
from protocol.admission import Ticket, open_ticket, ticket_from_text, ticket_to_text
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import AdmissionError, MissingFileError, PeerFault
from protocol.files import write_atomically
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest

MAX_FILE_BYTES = 4096


def require_admission(
    manifest: Manifest, run_dir: RunDir, given: Path | None, remedy: str = "join again with --ticket FILE"
) -> None:
    """Check that the run admits this node, and keep a given ticket in its folder; creates the node's key.

    `remedy` says what to do with a ticket.

    Raises:
        AdmissionError: the run does not admit it; the text says what to do.
        MissingFileError: the given file cannot be read.
    """
    rule, name = manifest.admission, manifest.run.name
    if rule.mode == "open":
        return
    run_dir.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    peer_id = Identity.load_or_create(run_dir.key).peer_id
    if peer_id in rule.revoked or (rule.mode == "list" and peer_id not in rule.keys):
        raise AdmissionError(f"the run {name} does not admit your key; ask its organiser to add {peer_id}")
    if rule.mode != "tickets":
        return
    if given is not None:
        _keep(manifest, run_dir, peer_id, _read(given))
    if load_own_ticket(manifest, run_dir, peer_id) is None:
        raise AdmissionError(
            f"the run {name} admits only keys with a ticket; send your key {peer_id} to its organiser, and {remedy}"
        )


def load_own_ticket(manifest: Manifest, run_dir: RunDir, peer_id: PeerId) -> SignedMessage[Ticket] | None:
    """Return the valid ticket in a node's folder, None if there is none. Raises AdmissionError if it has expired."""
    if manifest.admission.mode != "tickets" or not run_dir.ticket.exists():
        return None
    signed = _parse(_read(run_dir.ticket))
    return SignedMessage.of(signed, _check(manifest, peer_id, signed))


def _keep(manifest: Manifest, run_dir: RunDir, peer_id: PeerId, text: str) -> None:
    signed = _parse(text)
    _check(manifest, peer_id, signed)
    write_atomically(run_dir.ticket, f"{ticket_to_text(signed)}\n".encode())


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise MissingFileError(f"cannot read the ticket {path}: {error.strerror}; name an existing file") from error


def _parse(text: str) -> wire.Signed:
    try:
        return ticket_from_text(text)
    except PeerFault as error:
        raise AdmissionError(f"this is not a ticket: {error}") from error


def _check(manifest: Manifest, peer_id: PeerId, signed: wire.Signed) -> Ticket:
    try:
        ticket = open_ticket(signed, manifest.whole_run_id, manifest.run.organiser_key)
    except PeerFault as error:
        raise AdmissionError(
            f"the ticket is not one of the organiser for the run {manifest.run.name}: {error}; ask for another one"
        ) from error
    if ticket.key != peer_id:
        raise AdmissionError(f"the ticket is for the key {ticket.key}, but this node has {peer_id}; ask for one for it")
    if ticket.until < time.time():
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ticket.until))
        raise AdmissionError(f"the ticket ended at {ended}; ask the organiser for another one for {peer_id}")
    return ticket

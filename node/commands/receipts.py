"""`murmur receipt` and `murmur verify`: write the receipts of a run, and check them offline."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.commit_log import commit_file_header, receipt_name
from node.daemon.receipts.ledger import RunLedger, commit_reader, read_ledger
from node.daemon.receipts.receipt import (
    Receipt,
    describe_account,
    describe_missing,
    issue_receipt,
    read_receipt,
    verify_receipts,
)
from node.dashboard.event_log import EVENT_FILE_NAME, read_events
from node.dashboard.events import PeerAppeared
from node.monitoring.logs import sanitize
from node.own_voucher import find_voucher
from node.run_dir import RunDir, write_atomically
from node.run_file import load_run_file
from protocol.errors import MalformedError, ReceiptError, StorageError, UsageError
from protocol.identity import Identity, PeerId
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest, RunId
from protocol.pipeline.stage import StageManifest
from protocol.signing import SignedManifest, TrustPoint, fingerprint

RECEIPTS_FOLDER = "receipts"
MIN_ID_END = 4  # characters of a peer id that may stand for it
MAX_SHOWN_PEERS = 8


def write_receipts(folder: Path, who: str | None, out: Path | None) -> list[str]:
    """Write the receipt of one peer, or of all peers; returns the lines to print.

    `who` is a peer id, the end of one, or a name; `out` is the file for one receipt.
    """
    if out is not None and who is None:
        raise UsageError("--out is for the receipt of one peer; name the peer too")
    names = read_names(folder)
    peers = None if who is None else {find_peer(who, names, read_own_ledger(folder).accounts.keys())}
    ledger = read_own_ledger(folder, peers)
    manifest, issuer = load_manifest(folder / "run.toml"), Identity.load_or_create(RunDir(folder).key)
    run, voucher = _run_of(manifest, ledger.header.run_id), find_voucher(manifest, RunDir(folder), issuer.peer_id)
    lines = []
    for peer in sorted(peers or ledger.accounts, key=lambda peer: (-ledger.accounts[peer].tokens, peer)):
        receipt = issue_receipt(ledger, run, peer, names.get(peer, ""), issuer, voucher)
        path = out or folder / RECEIPTS_FOLDER / receipt_file_name(receipt)
        _write(path, receipt.to_json())
        lines.append(f"{path}: {describe_account(ledger.accounts[peer], ledger.head.tokens)}")
    if peers is None:
        lines.append(f"together {ledger.tokens:,} tokens in {ledger.head.round:,} rounds{describe_missing(ledger)}")
    return [*lines, f"check them with `murmur verify RECEIPT... {folder / COMMIT_FILE_NAME}`"]


def _run_of(manifest: Manifest, run_id: RunId) -> str:
    """Return the name of the run whose commits a folder has, with the stage of a pipeline."""
    if not manifest.pipeline.is_cut:
        return manifest.run.name
    stages = (StageManifest.of(manifest, stage) for stage in range(manifest.pipeline.stages))
    return next(receipt_name(each) for each in stages if each.run_id == run_id)


@dataclass(frozen=True)
class VerifyOptions:
    """The things that a reader of receipts knows from elsewhere, which a stranger cannot make up.

    Args:
        issuer: the key that must have signed them.
        run: the manifest of the run.
        trust: a point of its chain.
    """

    issuer: PeerId | None = None
    run: Path | None = None
    trust: TrustPoint | None = None

    @classmethod
    def of(cls, issuer: str | None, run: Path | None, trust: str | None) -> "VerifyOptions":
        """Check the options of a command line. Raises UsageError."""
        try:
            return cls(issuer, run, None if trust is None else TrustPoint.parse(trust))
        except MalformedError as error:
            raise UsageError(f"--trust: {error}") from error


NOTHING_KNOWN = VerifyOptions()


def verify_files(paths: Sequence[Path], commits: Path, options: VerifyOptions = NOTHING_KNOWN) -> list[str]:
    """Check receipts against the commits; returns the lines to print. Raises ReceiptError.

    The last line says to whose word, or to which voters, the receipts are bound.
    """
    receipts = [read_receipt(path) for path in paths]
    for receipt in receipts:
        if options.issuer not in (None, receipt.issuer, receipt.signer):
            raise ReceiptError(f"the receipt of {receipt.peer} is signed by {receipt.issuer}, not by {options.issuer}")
    signed = load_run_file(options.run) if options.run is not None else None
    trust = options.trust or (_trust_of(signed) if signed is not None else None)
    ledger = verify_receipts(receipts, commits, trust)
    if signed is not None:
        _require_run(signed.manifest, receipts, ledger)
    binding = _find_binding(receipts, ledger, options, signed)
    verdict = "valid" if binding else "agrees with the commits"
    lines = [sanitize(receipt.describe(verdict)) for receipt in receipts]
    sums = [_describe_sum(receipts)] if len(receipts) > 1 else []
    last = f"bound to {binding}" if binding else _describe_unbound(ledger, signed is not None, trust)
    return [*lines, *sums, _describe_certificates(ledger), last]


def _trust_of(signed: SignedManifest) -> TrustPoint | None:
    """Return the trust point that the organiser of a manifest signed; not that of another key."""
    return signed.trust if signed.manifest.run.organiser_key in ("", signed.organiser) else None


def _require_run(manifest: Manifest, receipts: Sequence[Receipt], ledger: RunLedger) -> None:
    """Raise ReceiptError unless the commits and the receipts are those of this run, or of one of its stages."""
    stages = range(manifest.pipeline.stages if manifest.pipeline.is_cut else 0)
    parts: list[Manifest] = [StageManifest.of(manifest, stage) for stage in stages]
    own = next((part for part in parts or [manifest] if part.run_id == ledger.header.run_id), None)
    if own is None:
        raise ReceiptError(
            f"the commits are of run {ledger.header.run_id[:12]}, the manifest is of {manifest.run_id[:12]}"
        )
    if commit_file_header(own) != ledger.header:
        raise ReceiptError("the first line of the commits names other voters or another organiser than the manifest")
    for receipt in receipts:
        if receipt.run != receipt_name(own):
            raise ReceiptError(
                f"the receipt of {receipt.peer} calls the run {sanitize(receipt.run)}, not {receipt_name(own)}"
            )


def _find_binding(
    receipts: Sequence[Receipt], ledger: RunLedger, options: VerifyOptions, signed: SignedManifest | None
) -> str:
    """Return the words for the thing to which receipts are bound; empty if a stranger could have made them up."""
    signers = {receipt.signer for receipt in receipts}
    if options.issuer is not None:
        return f"the word of {fingerprint(options.issuer)}, the key that you named"
    if signed is not None:
        organiser = signed.manifest.run.organiser_key or signed.organiser
        if organiser and signers == {organiser}:
            return f"the word of {fingerprint(organiser)}, the organiser's key of the manifest"
    if ledger.passes_trust and ledger.unbound_from is None:
        return f"the trust point {options.trust or 'of the manifest'}: voters acknowledged each round from there on"
    if signed is not None and ledger.unbound_from is None:
        return "the manifest: voters that it fixes, and those that these let in, acknowledged each round"
    return ""


def _describe_unbound(ledger: RunLedger, has_run: bool, trust: TrustPoint | None) -> str:
    text = "bound to nothing, anybody could have made these files up: "
    issuer = "the key of its host (--issuer PEER_ID)"
    if not has_run and trust is None:
        return f"{text}name the manifest of the run (--run RUN.toml), or {issuer}"
    reason = f"nothing shows that voters of the run acknowledged the rounds from {ledger.unbound_from} on"
    if ledger.unbound_from == 0:
        reason = "its manifest does not say who voted first"
    missed = f", and no commit passes through the trust point {trust}" if trust and not ledger.passes_trust else ""
    return f"{text}{reason}{missed}; name {issuer}, or a round that you trust (--trust POINT)"


def _describe_certificates(ledger: RunLedger) -> str:
    known = ledger.head.round - ledger.missing_rounds
    if not ledger.thin_rounds:
        return f"a quorum of all voters acknowledged each of the {known:,} rounds"
    return (
        f"a quorum of all voters acknowledged {known - ledger.thin_rounds:,} of the {known:,} rounds; in the others, "
        "voters were gone"
    )


def _describe_sum(receipts: Sequence[Receipt]) -> str:
    unique = {receipt.peer: receipt for receipt in receipts}.values()
    tokens, heads = sum(receipt.tokens for receipt in unique), {receipt.chain_digest for receipt in unique}
    if len(heads) > 1:
        return f"together {tokens:,} tokens, counted at different rounds"
    first = receipts[0]
    rest = first.run_tokens - first.missing_tokens - tokens
    if rest:
        return f"together {tokens:,} of {first.run_tokens:,} tokens; receipts for {rest:,} tokens are not among them"
    missing = f"; {first.missing_tokens:,} are in rounds without commits" if first.missing_tokens else ""
    return f"together {tokens:,} of {first.run_tokens:,} tokens of the run, exactly{missing}"


def read_own_ledger(folder: Path, followed: Set[PeerId] | None = frozenset()) -> RunLedger:
    """Add up the commits in a folder of this machine, whose signatures were checked before they were written."""
    path = folder / COMMIT_FILE_NAME
    if not path.exists():
        raise UsageError(f"{folder} has no {COMMIT_FILE_NAME}; name the --dir of a node that has seen a round")
    return read_ledger(path, commit_reader, followed)


def read_names(folder: Path) -> dict[PeerId, str]:
    """Return the names of the peers that the host has seen, by its event log; a volunteer's node knows none."""
    path = folder / EVENT_FILE_NAME
    events = read_events(path) if path.exists() else ()
    return {event.now.peer: event.now.name for event in events if isinstance(event, PeerAppeared) and event.now.name}


def find_peer(who: str, names: Mapping[PeerId, str], known: Iterable[PeerId]) -> PeerId:
    """Return the peer of that id, end of an id, or name. Raises UsageError unless exactly one has counted work."""
    peers = set(known)
    found = [peer for peer in sorted(peers) if names.get(peer) == who] if who not in peers else [who]
    found = found or [peer for peer in sorted(peers) if len(who) >= MIN_ID_END and peer.endswith(who.lstrip("."))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{len(found)} peers are called {sanitize(who)}; name one by its id: {', '.join(found)}")
    shown = ", ".join(sanitize(names.get(peer) or peer) for peer in sorted(peers)[:MAX_SHOWN_PEERS])
    raise UsageError(f"no commit counts work of {sanitize(who)}; there is work of {shown or 'nobody yet'}")


def receipt_file_name(receipt: Receipt) -> str:
    """Return a file name that is safe whatever the peer calls itself."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", receipt.name).strip("-")[:32]
    return f"{name or 'peer'}-{receipt.peer[-6:]}.json"


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}; name another --out") from error
    write_atomically(path, content)

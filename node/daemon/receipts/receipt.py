"""A receipt: the counted work of one volunteer, signed by the host, and checked offline against the signed commits.

Where the run has an organiser, the receipt carries its voucher for the host's key (`protocol.signing.Voucher`).

The host's signature covers "murmur/1" NUL "receipt" NUL and the JSON of the receipt without its signature, with sorted
keys and without spaces. It states which chain the run followed. Everything else follows from the commits: who signed
which contribution, in which round it counts, and with how many tokens; and which trainers learned from the groups of a
rollout peer, by their signed contributions (`protocol.rollout_credits`).

`ReceiptIssuer` serves visitors of the host's page: it issues one receipt at a time in a thread, and keeps the newest.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.daemon.receipts.commit_log import CommitLog
from node.daemon.receipts.ledger import (
    CountedRollouts,
    CountedWork,
    PeerAccount,
    RunLedger,
    commit_reader,
    commit_verifier,
    read_ledger,
)
from node.units import format_plural
from protocol.errors import MissingFileError, PeerFault, ReceiptError
from protocol.fault_words import describe_faults
from protocol.identity import Identity, PeerId, verify
from protocol.manifest.run import RunId
from protocol.recent import RecentTable
from protocol.signing import DOMAIN, TrustPoint, Voucher, fingerprint

MAX_RECEIPT_BYTES = 256 << 20
MAX_SHOWN_NAME = 64
COMPARED_FIELDS = (
    "format", "organiser", "run_rounds", "chain_digest", "run_tokens", "missing_tokens", "segments", "tokens", "rounds",
    "groups", "rollout_tokens", "rollouts",
)  # fmt: skip
Hex32 = str
MAX_KEPT_RECEIPTS = 32


class ReceiptModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReceiptEntry(ReceiptModel):
    """One counted contribution."""

    round: int = Field(description="the round that counts it; the first is 0")
    age: int = Field(description="rounds from its own round to the one that counts it")
    tokens: int
    steps: int
    message: Hex32 = Field(description="digest of the contribution message")
    signature: str = Field(description="signature of the volunteer, base64")
    chain_digest: Hex32 = Field(description="digest of the chain after the round")


class ReceiptCredit(ReceiptModel):
    """The groups of the peer that one trainer learned from in a round, as far as they count."""

    trainer: PeerId
    groups: int
    tokens: int


class ReceiptRollouts(ReceiptModel):
    """The groups of the peer that a round counts."""

    round: int
    credits: tuple[ReceiptCredit, ...]
    chain_digest: Hex32 = Field(description="digest of the chain after the round")


class ReceiptSegment(ReceiptModel):
    """Consecutive rounds whose commits the host has; between two segments some are missing."""

    first_round: int
    last_round: int
    start_digest: Hex32
    end_digest: Hex32
    start_tokens: int


class ReceiptContent(ReceiptModel):
    """Everything that the host signs."""

    format: str = "murmur receipt 2"
    run: str
    run_id: str
    organiser: str = Field(description="the key that may steer the run; empty if there is none")
    peer: PeerId
    name: str
    tokens: int
    rounds: int
    run_tokens: int
    run_rounds: int
    missing_tokens: int = Field(description="of the run, in rounds whose commits the host does not hold")
    chain_digest: Hex32
    segments: tuple[ReceiptSegment, ...]
    contributions: tuple[ReceiptEntry, ...]
    groups: int = Field(description="of its rollouts, from which trainers learned")
    rollout_tokens: int = Field(description="of these groups; the trainers count them as theirs too")
    rollouts: tuple[ReceiptRollouts, ...]
    issuer: PeerId
    voucher: str = Field(default="", description="with which the organiser vouches for the issuer; empty: it does not")

    def signed_bytes(self) -> bytes:
        content = {name: value for name, value in self.model_dump(mode="json").items() if name != "signature"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return b"\0".join((DOMAIN, b"receipt", text.encode()))

    @property
    def signer(self) -> PeerId:
        """Return the key that answers for the receipt: the organiser's if it vouches for the issuer."""
        return self.organiser if self.voucher else self.issuer

    @property
    def share(self) -> float:
        """Return the peer's share of the run's tokens."""
        return self.tokens / self.run_tokens if self.run_tokens else 0.0


class Receipt(ReceiptContent):
    """A receipt with the host's signature, base64."""

    signature: str

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode() + b"\n"

    def describe(self, verdict: str) -> str:
        """Return the line that a successful check prints."""
        who = self.name or f"..{self.peer[-6:]}"
        return f"{verdict}: {who} gave {self.describe_work()}; signed by {fingerprint(self.signer)}"

    def describe_work(self) -> str:
        """Return the counted work, without the name of the peer."""
        trained = (
            f"{self.tokens:,} tokens in {format_plural(self.rounds, 'round')} of run {self.run} ({self.share:.1%})"
        )
        if not self.groups:
            return trained
        drawn = describe_rollouts(self.groups, self.rollout_tokens, len(self.rollouts))
        return f"{trained}, and {drawn}" if self.rounds else f"{drawn} of run {self.run}"


def issue_receipt(
    ledger: RunLedger, run: str, peer: PeerId, name: str, issuer: Identity, voucher: Voucher | None = None
) -> Receipt:
    """Sign a receipt for a peer that the ledger follows; `voucher` is that of the run's organiser for the issuer."""
    content = build_content(ledger, run, peer, name[:MAX_SHOWN_NAME], issuer.peer_id)
    return sign_content(content.model_copy(update={"voucher": str(voucher or "")}), issuer)


def sign_content(content: ReceiptContent, issuer: Identity) -> Receipt:
    signature = base64.b64encode(issuer.sign(content.signed_bytes())).decode()
    return Receipt.model_validate({**content.model_dump(), "signature": signature})


def build_content(ledger: RunLedger, run: str, peer: PeerId, name: str, issuer: PeerId) -> ReceiptContent:
    """Build the content of a receipt for `peer` from these commits."""
    account = ledger.accounts.get(peer, PeerAccount())
    return ReceiptContent(
        run=run,
        run_id=ledger.header.run_id,
        organiser=ledger.header.organiser,
        peer=peer,
        name=name,
        tokens=account.tokens,
        rounds=account.rounds,
        run_tokens=ledger.head.tokens,
        run_rounds=ledger.head.round,
        missing_tokens=ledger.missing_tokens,
        chain_digest=ledger.head.digest.hex(),
        segments=_build_segments(ledger),
        contributions=tuple(_build_entry(work) for work in ledger.works.get(peer, ())),
        groups=account.groups,
        rollout_tokens=account.rollout_tokens,
        rollouts=tuple(_build_rollouts(counted) for counted in ledger.rollouts.get(peer, ())),
        issuer=issuer,
    )


def describe_rollouts(groups: int, tokens: int, rounds: int) -> str:
    """Return the counted rollouts of a peer in words."""
    drawn, counted = format_plural(groups, "group"), format_plural(rounds, "round")
    return f"{drawn} of rollouts with {tokens:,} tokens that trainers learned in {counted}"


def describe_account(account: PeerAccount, run_tokens: int) -> str:
    """Return the counted work of a peer, with its share of the run's tokens."""
    share = account.tokens / max(1, run_tokens)
    trained = f"{account.tokens:,} tokens in {format_plural(account.rounds, 'round')} ({share:.1%})"
    drawn = describe_rollouts(account.groups, account.rollout_tokens, account.rollout_rounds)
    return ", and ".join([trained] * bool(account.rounds) + [drawn] * bool(account.groups))


def describe_missing(ledger: RunLedger) -> str:
    """Return the end of a sentence that names the rounds without commits; empty if there are none."""
    rounds, tokens = ledger.missing_rounds, ledger.missing_tokens
    return f"; the commits of {rounds:,} rounds with {tokens:,} tokens are missing" if rounds else ""


def _build_segments(ledger: RunLedger) -> tuple[ReceiptSegment, ...]:
    return tuple(
        ReceiptSegment(
            first_round=segment.start.round,
            last_round=segment.end.round - 1,
            start_digest=segment.start.digest.hex(),
            end_digest=segment.end.digest.hex(),
            start_tokens=segment.start.tokens,
        )
        for segment in ledger.segments
        if segment.start != segment.end
    )


def _build_entry(work: CountedWork) -> ReceiptEntry:
    message, body = work.contribution, work.contribution.body
    return ReceiptEntry(
        round=work.round,
        age=body.age,
        tokens=work.tokens,
        steps=body.steps,
        message=message.digest.hex(),
        signature=base64.b64encode(message.signed.signature).decode(),
        chain_digest=work.chain_digest.hex(),
    )


def _build_rollouts(counted: CountedRollouts) -> ReceiptRollouts:
    return ReceiptRollouts(
        round=counted.round,
        credits=tuple(
            ReceiptCredit(trainer=trainer, groups=credit.groups, tokens=credit.tokens)
            for trainer, credit in counted.by_trainer
        ),
        chain_digest=counted.chain_digest.hex(),
    )


def read_receipt(path: Path) -> Receipt:
    """Read a receipt. Raises MissingFileError, and ReceiptError if it is not one."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RECEIPT_BYTES + 1)
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; name a receipt") from error
    try:
        return Receipt.model_validate_json(text)
    except ValidationError as error:
        raise ReceiptError(f"{path} is not a receipt: {describe_faults(error)}") from error


def verify_receipts(receipts: Sequence[Receipt], commits: Path, trust: TrustPoint | None = None) -> RunLedger:
    """Check receipts against a file of commits, and return the account of the longest chain that they name.

    `trust` is a point of the chain for which a person vouches.

    Raises ReceiptError with the reason, and MissingFileError.
    """
    for receipt in receipts:
        verify_issuer(receipt)
    for run_rounds in sorted({receipt.run_rounds for receipt in receipts}):
        asked = [receipt for receipt in receipts if receipt.run_rounds == run_rounds]
        peers = {receipt.peer for receipt in asked}
        ledger = read_ledger(commits, commit_verifier, peers, up_to_round=run_rounds, trust=trust)
        for receipt in asked:
            compare(receipt, ledger)
    return ledger


def verify_issuer(receipt: Receipt) -> None:
    """Raise ReceiptError unless the issuer signed exactly this receipt."""
    try:
        verify(receipt.issuer, receipt.signed_bytes(), base64.b64decode(receipt.signature, validate=True))
    except (PeerFault, ValueError) as error:  # base64 that is not ASCII is a ValueError
        raise ReceiptError(
            f"the receipt of {receipt.peer} is not what {receipt.issuer} signed: it was changed, or forged"
        ) from error


def _verify_voucher(receipt: Receipt, run_id: RunId) -> None:
    """Raise ReceiptError unless the organiser of the whole run vouches for the issuer."""
    try:
        voucher = Voucher.parse(receipt.voucher, receipt.organiser)
        voucher.verify(run_id)
        is_right = voucher.host == receipt.issuer
    except (PeerFault, ValueError):
        is_right = False
    if not is_right:
        raise ReceiptError(
            f"the organiser of the run does not vouch for {receipt.issuer}, which signed the receipt of {receipt.peer}"
        )


def compare(receipt: Receipt, ledger: RunLedger) -> None:
    """Raise ReceiptError unless the receipt agrees with the commits in every field."""
    expected = build_content(ledger, receipt.run, receipt.peer, receipt.name, receipt.issuer)
    if receipt.run_id != expected.run_id:
        raise ReceiptError(f"the receipt is for run {receipt.run_id[:12]}, the commits are of {expected.run_id[:12]}")
    _compare_entries(receipt, {entry.round: entry for entry in expected.contributions})
    for field in COMPARED_FIELDS:
        shown, found = getattr(receipt, field), getattr(expected, field)
        if shown != found:
            raise ReceiptError(f"the receipt and the commits differ in {field}: {_shorten(shown)}, {_shorten(found)}")
    if receipt.voucher:
        _verify_voucher(receipt, ledger.header.whole_run or ledger.header.run_id)


def _compare_entries(receipt: Receipt, expected: dict[int, ReceiptEntry]) -> None:
    seen: set[int] = set()
    for entry in receipt.contributions:
        if entry.round in seen:
            raise ReceiptError(f"the receipt counts round {entry.round} twice")
        seen.add(entry.round)
        found = expected.get(entry.round)
        if found is None:
            raise ReceiptError(f"the commits have no contribution of {receipt.peer} in round {entry.round}")
        if found != entry:
            raise ReceiptError(f"the contribution of round {entry.round} is another one in the commits")
    if left_out := sorted(expected.keys() - seen):
        raise ReceiptError(f"the receipt leaves out round {left_out[0]}, which the commits have")


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


class ReceiptIssuer:
    """Issues receipts from a commit log; `name_of` returns the name of a peer, or an empty text."""

    def __init__(
        self, commit_log: CommitLog, run: str, identity: Identity, name_of: Callable[[PeerId], str],
        voucher: Voucher | None = None,
    ) -> None:  # fmt: skip
        self._commit_log = commit_log
        self._run = run
        self._identity = identity
        self._name_of = name_of
        self._voucher = voucher
        self._lock = asyncio.Lock()
        self._kept = RecentTable[tuple[PeerId, bytes], Receipt](MAX_KEPT_RECEIPTS)

    @property
    def path(self) -> Path:
        """Return the file of commits against which receipts are checked."""
        return self._commit_log.path

    def overview(self) -> dict[str, Any]:
        """Return the counted tokens and rounds of all peers, as JSON values."""
        ledger = self._commit_log.ledger
        accounts = sorted(ledger.accounts.items(), key=lambda item: (-item[1].tokens, item[0]))
        return {
            "run": self._run,
            "run_id": ledger.header.run_id,
            "rounds": ledger.head.round,
            "tokens": ledger.head.tokens,
            "missing_rounds": ledger.missing_rounds,
            "missing_tokens": ledger.missing_tokens,
            "chain_digest": ledger.head.digest.hex(),
            "issuer": self._identity.peer_id,
            "voucher": str(self._voucher or ""),
            "peers": [
                {
                    "peer": peer,
                    "name": self._name_of(peer),
                    "tokens": account.tokens,
                    "rounds": account.rounds,
                    "groups": account.groups,
                    "rollout_tokens": account.rollout_tokens,
                }
                for peer, account in accounts
            ],
        }

    async def issue(self, peer: PeerId) -> Receipt | None:
        """Return the receipt of a peer at the newest round; `None` if no commit counts its work."""
        if peer not in self._commit_log.ledger.accounts:
            return None
        async with self._lock:
            head = self._commit_log.head
            kept = self._kept.get((peer, head.digest))
            if kept is None:
                kept = await asyncio.to_thread(self._build, peer, head.round)
                self._kept[peer, head.digest] = kept
            return kept

    def _build(self, peer: PeerId, round_number: int) -> Receipt:
        ledger = read_ledger(self.path, commit_reader, {peer}, up_to_round=round_number)
        return issue_receipt(ledger, self._run, peer, self._name_of(peer), self._identity, self._voucher)

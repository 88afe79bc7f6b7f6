"""`murmur verify` says to what receipts are bound: a stranger can make up a whole run, but no voters of a manifest."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from node.commands.receipts import VerifyOptions, verify_files, write_receipts
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME, Start, encode_commit, encode_start
from node.daemon.receipts.commit_log import commit_file_header
from node.daemon.receipts.ledger import RunLedger
from node.daemon.receipts.receipt import read_receipt, sign_content
from node.run_dir import RunDir
from protocol.admission import Ticket, issue_ticket
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ReceiptError, UsageError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.signing import TrustPoint, Voucher, fingerprint, sign_manifest
from tests.certificates import certify
from tests.node.small_run import PEERS, SHAPES, TOML, stated

HONEST, MALLORY, ORGANISER = (1, 2, 3), 4, PEERS[5]
TEXT = TOML.format(target="", min_peers=1)
STATE = b"\x05" * 32  # which every certificate names
HUGE = 1 << 38


def manifest_of(admission: str = "") -> Manifest:
    return parse_manifest((TEXT + admission).encode(), "test")


def keys_of(numbers: Sequence[int]) -> str:
    return "[" + ", ".join(f'"{PEERS[number].peer_id}"' for number in numbers) + "]"


OPEN = manifest_of()
FOUNDED = manifest_of(f"[admission]\nfounders = {keys_of(HONEST)}\n")
LISTED = manifest_of(f'[admission]\nmode = "list"\nkeys = {keys_of(HONEST)}\n')
STEERED = parse_manifest(
    (
        TEXT.replace("[model]", f'organiser_key = "{ORGANISER.peer_id}"\n[model]') + '[admission]\nmode = "tickets"\n'
    ).encode(),
    "test",
)


class Writer:
    """Writes the commits of a run as they come, and the manifest, into the folder of a node."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.chain = Chain.from_genesis(manifest.run_id, manifest.admission)
        self.run = folder / "run.toml"
        self.run.write_text(manifest.to_toml())
        (folder / COMMIT_FILE_NAME).write_bytes(commit_file_header(manifest).to_line())

    def write(self, rounds: int, contributors: Sequence[int], signers: Sequence[int] = (), tokens: int = 100) -> None:
        for _ in range(rounds):
            entry = self.commit(contributors, signers or contributors, tokens)
            self.chain.append(entry)
            self.record(encode_commit(entry))

    def record(self, content: bytes) -> None:
        with (self.folder / COMMIT_FILE_NAME).open("ab") as file:
            file.write(content)

    def commit(self, contributors: Sequence[int], signers: Sequence[int], tokens: int) -> CertifiedCommit:
        head, run_id = self.chain.head, self.manifest.run_id
        sent = []
        for number in contributors:
            parts = (Blob.of(f"{head.round} {number}".encode()),)
            ticket = self.ticket_of(PEERS[number]) if self.manifest.admission.mode == "tickets" else None
            body = Contribution(head.round, head.digest, "diloco", SHAPES.hash(), tokens, 5, 3.0, parts, ticket=ticket)
            sent.append(stated(PEERS[number], body, run_id))
        ordered = tuple(sorted(sent, key=lambda message: message.sender))
        commit = stated(PEERS[contributors[0]], Commit(head.round, 0, head.digest, ordered, ()), run_id)
        return certify(commit, self.chain, run_id, [PEERS[number] for number in signers], STATE)

    def ticket_of(self, holder: Identity) -> SignedMessage[Ticket]:
        ticket = Ticket(holder.peer_id, 2e9)
        return SignedMessage.of(issue_ticket(ORGANISER, self.manifest.run_id, ticket), ticket)

    def point(self) -> TrustPoint:
        head = self.chain.head
        return TrustPoint.of(head.round, head.digest, STATE, self.chain.electorate.digest)

    def receipt(self) -> Path:
        """Write the receipt of the first contributor, signed by the key of this folder."""
        write_receipts(
            self.folder, PEERS[MALLORY].peer_id if self.is_forged else PEERS[1].peer_id, self.folder / "r.json"
        )
        return self.folder / "r.json"

    is_forged = False
    line = ""  # about the receipt that was verified last

    def verify(self, options: VerifyOptions) -> tuple[str, str]:
        """Return the verdict, and the line about the binding."""
        lines = verify_files([self.receipt()], self.folder / COMMIT_FILE_NAME, options)
        self.line = lines[0]
        return lines[0].partition(":")[0], lines[-1]

    def verify_run(self) -> tuple[str, str]:
        return self.verify(VerifyOptions(run=self.run))


def forged(folder: Path, manifest: Manifest) -> Writer:
    """Return a run of a hundred rounds that Mallory made up for this manifest."""
    writer = Writer(folder, manifest)
    writer.is_forged = True
    writer.write(100, [MALLORY], tokens=HUGE)
    return writer


UNBOUND, NOBODY = "agrees with the commits", "bound to nothing, anybody could have made these files up"


@pytest.mark.parametrize("manifest", [OPEN, FOUNDED, LISTED], ids=["open", "founders", "list"])
def test_run_that_a_stranger_made_up_is_not_called_valid(tmp_path: Path, manifest: Manifest) -> None:
    writer = forged(tmp_path, manifest)
    for options in (VerifyOptions(), VerifyOptions(run=writer.run)):
        verdict, binding = writer.verify(options)
        assert verdict == UNBOUND and binding.startswith(NOBODY), binding


def test_control_without_the_check_of_the_voters_it_is_called_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLedger, "_unbind", lambda self: None)
    verdict, _ = forged(tmp_path, FOUNDED).verify_run()
    assert verdict == "valid"


@pytest.mark.parametrize("manifest", [FOUNDED, LISTED, STEERED], ids=["founders", "list", "tickets"])
def test_voters_that_the_manifest_fixes_bind_a_receipt(tmp_path: Path, manifest: Manifest) -> None:
    writer = Writer(tmp_path, manifest)
    writer.write(6, HONEST)
    assert writer.verify_run() == (
        "valid",
        "bound to the manifest: voters that it fixes, and those that these let in, acknowledged each round",
    )
    verdict, binding = writer.verify(VerifyOptions())
    assert verdict == UNBOUND and "--run" in binding, "without the manifest nothing is fixed"


def test_round_that_a_stranger_adds_to_a_true_file_unbinds_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, FOUNDED)
    writer.write(6, HONEST)
    writer.write(1, [MALLORY], tokens=HUGE)
    writer.is_forged = True
    verdict, binding = writer.verify_run()
    assert verdict == UNBOUND and "acknowledged the rounds from 6 on" in binding


def test_liar_with_a_third_of_the_votes_cannot_add_a_round(tmp_path: Path) -> None:
    writer = Writer(tmp_path, FOUNDED)
    writer.write(6, HONEST)
    writer.write(1, [MALLORY], signers=[1, MALLORY], tokens=HUGE)
    assert writer.verify_run()[0] == UNBOUND


def test_gap_unbinds_a_receipt_and_a_trust_point_after_it_binds_it_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path, OPEN)
    writer.write(4, HONEST)
    for _ in range(3):
        writer.chain.append(writer.commit(HONEST, HONEST, 100))
    writer.record(encode_start(Start(writer.chain.head, writer.chain.electorate)))
    writer.write(2, HONEST)
    point = writer.point()
    assert writer.verify_run()[0] == UNBOUND
    writer.write(2, HONEST)
    verdict, binding = writer.verify(VerifyOptions(trust=point))
    assert verdict == "valid" and str(point) in binding
    verdict, binding = writer.verify(VerifyOptions(trust=TrustPoint(point.round, b"\x01" * 16)))
    assert verdict == UNBOUND and "no commit passes through the trust point" in binding


def test_word_of_the_organiser_or_of_a_named_key_binds_a_receipt(tmp_path: Path) -> None:
    writer = Writer(tmp_path, OPEN)
    writer.write(3, HONEST)
    host = Identity.load_or_create(tmp_path / "key")
    verdict, binding = writer.verify(VerifyOptions(issuer=host.peer_id))
    assert verdict == "valid" and "the key that you named" in binding
    signed = tmp_path / "signed.toml"
    signed.write_bytes(sign_manifest(OPEN, host))
    verdict, binding = writer.verify(VerifyOptions(run=signed))
    assert verdict == "valid" and "the organiser's key of the manifest" in binding
    signed.write_bytes(sign_manifest(OPEN, PEERS[MALLORY]))
    assert writer.verify(VerifyOptions(run=signed))[0] == UNBOUND, "another key signed the receipt"


def test_receipt_of_a_host_is_signed_by_the_organiser_that_vouches_for_it(tmp_path: Path) -> None:
    """Page, join and verify print one fingerprint. Control: a host for which the organiser does not vouch."""
    writer = Writer(tmp_path, STEERED_OPEN)
    writer.write(3, HONEST)
    host = Identity.load_or_create(tmp_path / "key").peer_id
    verdict, binding = writer.verify(VerifyOptions(issuer=host))
    assert fingerprint(host) in writer.line and fingerprint(ORGANISER.peer_id) not in writer.line
    voucher = Voucher.issue(ORGANISER, STEERED_OPEN.run_id, host)
    RunDir(tmp_path).voucher.write_text(f"{voucher}\n")
    for options in (VerifyOptions(run=writer.run), VerifyOptions(issuer=ORGANISER.peer_id), VerifyOptions(issuer=host)):
        verdict, binding = writer.verify(options)
        assert verdict == "valid", binding
        assert f"signed by {fingerprint(ORGANISER.peer_id)}" in writer.line
    receipt = tmp_path / "r.json"
    assert f'"voucher": "{voucher}"' in receipt.read_text()
    forged = sign_content(
        read_receipt(receipt).model_copy(update={"voucher": str(Voucher.issue(ORGANISER, OPEN.run_id, host))}),
        Identity.load_or_create(tmp_path / "key"),
    )
    receipt.write_bytes(forged.to_json())
    with pytest.raises(ReceiptError, match="does not vouch for"):
        verify_files([receipt], tmp_path / COMMIT_FILE_NAME)


def test_trust_point_of_a_key_that_is_not_the_organisers_counts_for_nothing(tmp_path: Path) -> None:
    writer = forged(tmp_path, STEERED_OPEN)
    point = writer.point()
    writer.write(1, [MALLORY])
    signed = tmp_path / "signed.toml"
    signed.write_bytes(sign_manifest(STEERED_OPEN, PEERS[MALLORY], point))
    assert writer.verify(VerifyOptions(run=signed))[0] == UNBOUND
    signed.write_bytes(sign_manifest(STEERED_OPEN, ORGANISER, point))
    assert writer.verify(VerifyOptions(run=signed))[0] == "valid", "the control: the organiser's own word"


STEERED_OPEN = parse_manifest(
    TEXT.replace("[model]", f'organiser_key = "{ORGANISER.peer_id}"\n[model]').encode(), "test"
)


def test_receipts_of_another_run_or_rule_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, FOUNDED)
    writer.write(2, HONEST)
    other = tmp_path / "other.toml"
    other.write_text(OPEN.to_toml())
    with pytest.raises(ReceiptError, match="the commits are of run"):
        writer.verify(VerifyOptions(run=other))
    receipt, commits = writer.receipt(), tmp_path / COMMIT_FILE_NAME
    rule = commit_file_header(OPEN).to_line().replace(OPEN.run_id.encode(), FOUNDED.run_id.encode())
    commits.write_bytes(commits.read_bytes().replace(commit_file_header(FOUNDED).to_line(), rule))
    with pytest.raises(ReceiptError):
        verify_files([receipt], commits, VerifyOptions(run=writer.run))
    with pytest.raises(UsageError, match="--trust"):
        VerifyOptions.of(None, None, "12-xyz")

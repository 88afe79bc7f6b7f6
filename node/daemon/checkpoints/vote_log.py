"""Persist the vote of the open round, so that a node restarted after a kill does not vote differently.

The proofs of misdeeds, the convictions of audits with their findings, and the contradictions of results of a pipeline
are in files next to it.

The file is next to the node's key: a node that loses the folder loses both, and returns as a new peer without votes.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.audit_tracker import proves
from protocol.audits import open_finding
from protocol.conduct import PeerConvicted, Proof
from protocol.consensus.events import Lock, VoteRecord
from protocol.consensus.messages.contributions import Commit, ContributionLimits
from protocol.consensus.messages.kinds import CommitCertificate, parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import PeerFault, StorageError
from protocol.files import write_atomically
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Signed
from protocol.pipeline.results import Contradiction, ExcludedMaker


class VoteLog:
    """Stores the last vote of one node. `limits` are the run's, to check the proposal in it."""

    def __init__(self, path: Path, run_id: RunId, limits: ContributionLimits) -> None:
        self._path = path
        self._run_id = run_id
        self._limits = limits

    def save(self, vote: VoteRecord) -> None:
        """Write the vote; it is on disk when this returns. Raises StorageError."""
        values = {
            "round": vote.round,
            "base": vote.base.hex(),
            "view": vote.view,
            "lock": vote.lock.signed.SerializeToString().hex() if vote.lock else None,
            "members": sorted(vote.members),
            "confirmed": _write_lock(vote.confirmed),
        }
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> VoteRecord | None:
        """Return the last vote; None if this node never voted. Raises StorageError for a damaged file."""
        data = _read_if_there(self._path)
        try:
            return None if data is None else self._parse_vote(json.loads(data))
        except (ValueError, TypeError, KeyError, DecodeError, PeerFault) as error:
            raise StorageError(f"{self._path} is damaged: remove it, wait a minute and start again") from error

    def _parse_vote(self, values: dict[str, Any]) -> VoteRecord:
        lock = None if values["lock"] is None else self._parse_lock(bytes.fromhex(values["lock"]))
        members = frozenset(str(peer) for peer in values["members"])
        # Files of earlier versions confirm nothing.
        confirmed = None if not values.get("confirmed") else self._parse_confirmed(*values["confirmed"])
        base, view = bytes.fromhex(values["base"]), int(values["view"])
        return VoteRecord(int(values["round"]), base, view, lock, members, confirmed=confirmed)

    def _parse_lock(self, signed: bytes) -> SignedMessage[Commit]:
        message = parse(Signed.FromString(signed), self._run_id, self._limits)
        if not isinstance(message.body, Commit):
            raise ValueError("the lock is not a commit")
        return SignedMessage(message.signed, message.body, message.sender, message.digest)

    def _parse_confirmed(self, proposal: str, certificate: str) -> Lock:
        message = parse(Signed.FromString(bytes.fromhex(certificate)), self._run_id, self._limits)
        if not isinstance(message.body, CommitCertificate):
            raise ValueError("the confirmed proposal has no certificate")
        return Lock(self._parse_lock(bytes.fromhex(proposal)), message)


def _write_lock(lock: Lock | None) -> list[str] | None:
    if lock is None:
        return None
    return [message.signed.SerializeToString().hex() for message in (lock.proposal, lock.certificate)]


def _read_if_there(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none. Raises StorageError if the disk refuses it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; fix its folder or choose another --dir") from error


def _read_entries(path: Path) -> list[Any]:
    """Return the entries of a JSON list; a file that is missing or damaged has none. Raises StorageError."""
    try:
        entries = json.loads(_read_if_there(path) or b"[]")
    except ValueError:
        return []
    return entries if isinstance(entries, list) else []


class ProofFile:
    """The file with the proofs that a node knows. `limits` are the run's, to check the statements in them."""

    def __init__(self, path: Path, run_id: RunId, limits: ContributionLimits) -> None:
        self._path = path
        self._run_id = run_id
        self._limits = limits

    def save(self, proofs: tuple[SignedMessage[Proof], ...]) -> None:
        """Write all proofs. Raises StorageError."""
        write_atomically(self._path, wire.Proof(statements=[proof.signed for proof in proofs]).SerializeToString())

    def load(self) -> list[SignedMessage[Proof]]:
        """Return the proofs that are on disk and valid; a damaged file holds none. Raises StorageError."""
        try:
            entries = wire.Proof.FromString(_read_if_there(self._path) or b"").statements
        except DecodeError:
            return []
        return [proof for signed in entries if (proof := self._open(signed)) is not None]

    def _open(self, signed: wire.Signed) -> SignedMessage[Proof] | None:
        try:
            message: SignedMessage[Any] = parse(signed, self._run_id, self._limits)
        except PeerFault:
            return None
        return message if isinstance(message.body, Proof) else None


class ConvictionFile:
    """The file with the keys that audits excluded: JSON, an entry for each audited contribution.

    An entry has what anybody needs to judge it again: the signed contribution, the signed findings on it, and the
    voters of its round. `limits` are the run's, to check the contribution.
    """

    def __init__(self, path: Path, run_id: RunId, limits: ContributionLimits) -> None:
        self._path = path
        self._run_id = run_id
        self._limits = limits

    def save(self, convictions: Iterable[PeerConvicted]) -> None:
        """Write all convictions. Raises StorageError."""
        entries: dict[tuple[bytes, ...], dict[str, Any]] = {}
        for each in convictions:
            findings = tuple(signed.SerializeToString() for signed in each.findings)
            entry = entries.setdefault(
                findings,
                {
                    "offence": each.offence,
                    "round": each.round,
                    "peers": [],
                    "voters": sorted(each.voters),
                    "contribution": each.contribution.SerializeToString().hex(),
                    "findings": [signed.hex() for signed in findings],
                },
            )
            entry["peers"].append(each.peer)
        if entries or self._path.exists():
            write_atomically(self._path, json.dumps(list(entries.values())).encode())

    def load(self) -> list[PeerConvicted]:
        """Return the convictions whose findings prove them; a damaged file has none. Raises StorageError."""
        return [found for entry in _read_entries(self._path) for found in self._proved(entry)]

    def _proved(self, entry: Any) -> Iterator[PeerConvicted]:
        """Yield the convictions of an entry that its signed findings prove."""
        try:
            findings = tuple(Signed.FromString(bytes.fromhex(text)) for text in entry["findings"])
            signed = Signed.FromString(bytes.fromhex(entry["contribution"]))
            voters, offence, number = frozenset(entry["voters"]), str(entry["offence"]), int(entry["round"])
            found = [PeerConvicted(str(peer), offence, number, findings, voters, signed) for peer in entry["peers"]]
            contribution = parse(signed, self._run_id, self._limits)
            opened = [open_finding(each, self._run_id) for each in findings]
        except (ValueError, TypeError, KeyError, DecodeError, PeerFault):
            return
        yield from (each for each in found if proves(each, opened, contribution))


class ContradictionFile:
    """The file with the keys whose results voters contradict: JSON, with all signed results and those voters."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, excluded: Iterable[ExcludedMaker]) -> None:
        """Write all of them. Raises StorageError."""
        entries = [
            {"contradiction": each.found.to_wire().SerializeToString().hex(), "voters": sorted(each.voters)}
            for each in excluded
        ]
        write_atomically(self._path, json.dumps(entries).encode())

    def load(self, run_ids: Collection[RunId]) -> list[ExcludedMaker]:
        """Return the keys that results of these stages prove guilty; a damaged file has none. Raises StorageError."""
        opened = map(self._open, _read_entries(self._path))
        return [each for each in opened if each is not None and each.found.run in run_ids and each.is_proved]

    def _open(self, entry: Any) -> ExcludedMaker | None:
        try:
            body = wire.Contradiction.FromString(bytes.fromhex(entry["contradiction"]))
            return ExcludedMaker(Contradiction.from_wire(body), frozenset(map(str, entry["voters"])))
        except (ValueError, TypeError, KeyError, DecodeError, PeerFault):
            return None

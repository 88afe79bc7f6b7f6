"""Persist the vote of the open round, so that a node restarted after a kill does not vote differently, and the proofs.

The file is next to the node's key: a node that loses the folder loses both, and returns as a new peer without votes.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.conduct import Proof
from protocol.consensus.events import VoteRecord
from protocol.consensus.messages.contributions import Commit, ContributionLimits
from protocol.consensus.messages.kinds import parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import PeerFault, StorageError
from protocol.files import write_atomically
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Signed


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
        }
        write_atomically(self._path, json.dumps(values).encode())

    def load(self) -> VoteRecord | None:
        """Return the last vote; None if this node never voted. Raises StorageError for a damaged file."""
        try:
            return self._parse_vote(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; fix its folder or choose another --dir"
            raise StorageError(text) from error
        except (ValueError, TypeError, KeyError, DecodeError, PeerFault) as error:
            raise StorageError(f"{self._path} is damaged: remove it, wait a minute and start again") from error

    def _parse_vote(self, values: dict[str, Any]) -> VoteRecord:
        lock = None if values["lock"] is None else self._parse_lock(bytes.fromhex(values["lock"]))
        members = frozenset(str(peer) for peer in values["members"])
        return VoteRecord(int(values["round"]), bytes.fromhex(values["base"]), int(values["view"]), lock, members)

    def _parse_lock(self, signed: bytes) -> SignedMessage[Commit]:
        message = parse(Signed.FromString(signed), self._run_id, self._limits)
        if not isinstance(message.body, Commit):
            raise ValueError("the lock is not a commit")
        return SignedMessage(message.signed, message.body, message.sender, message.digest)


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
            entries = wire.Proof.FromString(self._path.read_bytes()).statements
        except FileNotFoundError:
            return []
        except DecodeError:
            return []
        except OSError as error:
            text = f"cannot read {self._path}: {error.strerror}; fix its folder or choose another --dir"
            raise StorageError(text) from error
        return [proof for signed in entries if (proof := self._open(signed)) is not None]

    def _open(self, signed: wire.Signed) -> SignedMessage[Proof] | None:
        try:
            message: SignedMessage[Any] = parse(signed, self._run_id, self._limits)
        except PeerFault:
            return None
        return message if isinstance(message.body, Proof) else None

"""Keep the proofs of misdeeds in the folder of a node, so that a restarted node still excludes their keys."""

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from node.run_dir import write_atomically
from protocol import murmur_pb2 as wire
from protocol.conduct import Proof
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import PeerFault, StorageError
from protocol.manifest.run import RunId


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

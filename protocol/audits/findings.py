"""Write findings: the signed judgements of auditors about the contributions that they repeated. PURE."""

from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import check_digest
from protocol.consensus.messages.checks import check_round
from protocol.consensus.messages.signed import Digest
from protocol.errors import MalformedError
from protocol.identity import Identity, PeerId, public_key
from protocol.manifest.run import RunId
from protocol.signing import open_signed, sign

FINDING_KIND = "finding"
MAX_FINDING_BYTES = 512
Verdict = Literal["equal", "different", "not served", "not auditable"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """The verdict of an auditor on one contribution, which it names by its digest.

    `chain` is the digest of the chain after the commit of `round`, which drew the auditors.
    """

    round: int
    chain: Digest
    audited: PeerId
    contribution: Digest
    verdict: Verdict

    def to_wire(self) -> wire.Finding:
        return wire.Finding(
            round=self.round,
            chain=self.chain,
            audited=self.audited,
            contribution=self.contribution,
            verdict=VERDICTS.index(self.verdict),
        )

    @classmethod
    def from_wire(cls, body: wire.Finding) -> Self:
        """Check a finding. Raises MalformedError."""
        check_round(body.round, body.chain)
        public_key(body.audited)
        check_digest(body.contribution)
        if body.verdict >= len(VERDICTS):
            raise MalformedError(f"a finding with verdict {body.verdict}")
        return cls(body.round, body.chain, body.audited, body.contribution, VERDICTS[body.verdict])


@dataclass(frozen=True)
class SignedFinding:
    """A checked finding and its auditor; `signed` is its envelope."""

    signed: wire.Signed
    body: Finding
    auditor: PeerId


def sign_finding(identity: Identity, run_id: RunId, finding: Finding) -> SignedFinding:
    """Sign a finding."""
    signed = sign(identity, FINDING_KIND, run_id, finding.to_wire())
    return SignedFinding(signed, finding, identity.peer_id)


def open_finding(signed: wire.Signed, run_id: RunId) -> SignedFinding:
    """Return the checked finding in an envelope. Raises MalformedError or ForgedError."""
    body = open_signed(signed, run_id, FINDING_KIND, wire.Finding, MAX_FINDING_BYTES)
    return SignedFinding(signed, Finding.from_wire(body), signed.peer)

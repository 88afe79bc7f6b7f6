"""Mutual authentication of a direct TLS connection: both ends prove their Ed25519 keys, without a third party.

    server -> client   TLS 1.3, with a certificate whose key is the server's own; then 32 random bytes, the nonce
    client -> server   its peer id, and its signature over "murmur/1", the nonce, the certificate's hash, both peer ids

Why this is sound. TLS proves that the server holds the key of its certificate, and the client continues only if that
is the key inside the peer id it dialled: a man in the middle holds another key, so it gets neither a proof nor any
data. The proof names the server that it is meant for, so a server cannot pass it on to another. It contains the nonce
of this connection, which reached the client only through the server's TLS, so it cannot be replayed. Without the
client's key nobody can make one. The signed bytes begin unlike any record, TLS or libp2p transcript or certificate, so
a signature made for one purpose is invalid for another. TLS keys are fresh in each connection and session tickets are
off, so a key that is stolen later decrypts no recorded connection.
"""

import datetime
import hashlib
import os
import ssl
import tempfile

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from protocol.errors import ForgedError, MalformedError
from protocol.identity import PEER_ID_LENGTH, Identity, PeerId, public_key, verify

DOMAIN = b"murmur/1\0direct\0"
NONCE_BYTES = 32
SIGNATURE_BYTES = 64
PROOF_BYTES = PEER_ID_LENGTH + SIGNATURE_BYTES
# Pinned by its key: its dates say nothing, and a volunteer's clock may be anything.
VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class ServerHandshake:
    """The listener's side: `context` for TLS, and the check of a caller's proof."""

    def __init__(self, identity: Identity) -> None:
        self._peer_id = identity.peer_id
        certificate = _make_certificate(identity)
        self._certificate_der = certificate.public_bytes(Encoding.DER)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0
        _load_certificate(self.context, identity, certificate)

    def verify_proof(self, proof: bytes, nonce: bytes) -> PeerId:
        """Return the peer that made the proof for this nonce.

        Raises MalformedError or ForgedError.
        """
        if len(proof) != PROOF_BYTES:
            raise MalformedError(f"a proof has {PROOF_BYTES} bytes, not {len(proof)}")
        name, signature = proof[:PEER_ID_LENGTH], proof[PEER_ID_LENGTH:]
        if not name.isascii():
            raise MalformedError("a proof does not name a peer")
        peer = name.decode("ascii")
        verify(peer, _signed_bytes(nonce, self._certificate_der, self._peer_id, peer), signature)
        return peer


def make_client_context() -> ssl.SSLContext:
    """Return the context for dialling.

    `check_certificate` checks the certificate instead of TLS, which would only accept certificate authorities.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_certificate(server: PeerId, certificate: bytes | None) -> None:
    """Raise ForgedError unless the certificate belongs to the dialled peer.

    It is that of a finished TLS handshake, in DER.
    """
    try:
        key = x509.load_der_x509_certificate(certificate or b"").public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ForgedError(f"the host that answered for {server} has no peer certificate") from error
    if not isinstance(key, Ed25519PublicKey) or key.public_bytes_raw() != public_key(server).public_bytes_raw():
        raise ForgedError(f"the host that answered for {server} has another key")


def make_proof(identity: Identity, server: PeerId, certificate: bytes, nonce: bytes) -> bytes:
    """Return a client's proof, PROOF_BYTES long.

    The client must have checked the server's certificate before.
    """
    signature = identity.sign(_signed_bytes(nonce, certificate, server, identity.peer_id))
    return identity.peer_id.encode("ascii") + signature


def _signed_bytes(nonce: bytes, certificate: bytes, server: PeerId, client: PeerId) -> bytes:
    # Every part has a fixed length, so the concatenation is unambiguous.
    return b"".join((DOMAIN, nonce, hashlib.sha256(certificate).digest(), server.encode(), client.encode()))


def _make_certificate(identity: Identity) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "murmur")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.private_key.public_key())
        .serial_number(1)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
    )
    return builder.sign(identity.private_key, None)


def _load_certificate(context: ssl.SSLContext, identity: Identity, certificate: x509.Certificate) -> None:
    """Load key and certificate from a nameless file in memory; without memfd, from one of this user's own for a moment.

    OpenSSL reads keys only from files.
    """
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    text = key + certificate.public_bytes(Encoding.PEM)
    if not hasattr(os, "memfd_create"):  # macOS
        with tempfile.NamedTemporaryFile(prefix="murmur-certificate-") as named:
            named.write(text)
            named.flush()
            context.load_cert_chain(named.name)
        return
    descriptor = os.memfd_create("murmur-certificate", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")

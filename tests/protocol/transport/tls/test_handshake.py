"""Proofs of identity on a direct connection: they name one client, one server and one connection."""

import hashlib
import os
import ssl
import stat
import tempfile
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from protocol import signing
from protocol.errors import ForgedError, MalformedError, PeerFault
from protocol.identity import Identity
from protocol.murmur_pb2 import PeerRecord
from protocol.transport.tls.handshake import (
    PROOF_BYTES,
    ServerHandshake,
    _make_certificate,
    check_certificate,
    make_proof,
)

NONCE = os.urandom(32)


def certificate_of(identity: Identity) -> bytes:
    return _make_certificate(identity).public_bytes(Encoding.DER)


@pytest.fixture
def server() -> Identity:
    return Identity.create()


@pytest.fixture
def client() -> Identity:
    return Identity.create()


def test_proof_names_its_author(server: Identity, client: Identity) -> None:
    check_certificate(server.peer_id, certificate_of(server))
    proof = make_proof(client, server.peer_id, certificate_of(server), NONCE)
    assert len(proof) == PROOF_BYTES
    assert ServerHandshake(server).verify_proof(proof, NONCE) == client.peer_id


def test_key_is_loaded_without_memfd_and_leaves_no_file(
    server: Identity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on macOS; the file is readable by its owner alone while OpenSSL reads it."""
    seen: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: str) -> None:
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        load(context, path)

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    ServerHandshake(server)
    assert seen == [0o600] and not list(tmp_path.iterdir())


def test_proof_is_valid_for_one_connection_only(server: Identity, client: Identity) -> None:
    proof = make_proof(client, server.peer_id, certificate_of(server), NONCE)
    assert ServerHandshake(server).verify_proof(proof, NONCE) == client.peer_id
    with pytest.raises(ForgedError):
        ServerHandshake(server).verify_proof(proof, os.urandom(32))


def test_server_cannot_pass_on_a_proof(server: Identity, client: Identity) -> None:
    """A man in the middle gets a proof that is meant for him, made with any nonce he likes."""
    middle = Identity.create()
    for certificate in (certificate_of(middle), certificate_of(server)):
        proof = make_proof(client, middle.peer_id, certificate, NONCE)
        with pytest.raises(ForgedError):
            ServerHandshake(server).verify_proof(proof, NONCE)
    assert ServerHandshake(server).verify_proof(
        make_proof(client, server.peer_id, certificate_of(server), NONCE), NONCE
    )


def test_proof_of_another_identity_is_refused(server: Identity, client: Identity) -> None:
    thief = Identity.create()
    own = make_proof(thief, server.peer_id, certificate_of(server), NONCE)
    with pytest.raises(ForgedError):
        ServerHandshake(server).verify_proof(client.peer_id.encode() + own[-64:], NONCE)
    assert ServerHandshake(server).verify_proof(own, NONCE) == thief.peer_id


def test_signed_message_of_a_peer_is_not_a_proof(server: Identity, client: Identity) -> None:
    signed = signing.sign(client, "peer", "ab" * 32, PeerRecord(sequence=1))
    with pytest.raises(ForgedError):
        ServerHandshake(server).verify_proof(client.peer_id.encode() + signed.signature, NONCE)


@pytest.mark.parametrize("size", [0, 1, PROOF_BYTES - 1, PROOF_BYTES + 1, 1 << 20])
def test_proof_of_another_size_is_refused(server: Identity, size: int) -> None:
    with pytest.raises(MalformedError):
        ServerHandshake(server).verify_proof(bytes(size), NONCE)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_refused_as_proof(server: Identity, client: Identity, seed: int) -> None:
    proof = bytearray(make_proof(client, server.peer_id, certificate_of(server), NONCE))
    digest = hashlib.sha256(bytes([seed])).digest()
    proof[digest[0] % PROOF_BYTES] ^= 1 + digest[1] % 255
    for candidate in (bytes(proof), os.urandom(PROOF_BYTES)):
        with pytest.raises(PeerFault):
            ServerHandshake(server).verify_proof(candidate, NONCE)


def test_only_the_dialled_peers_certificate_is_accepted(server: Identity) -> None:
    check_certificate(server.peer_id, certificate_of(server))
    for other in (certificate_of(Identity.create()), b"", None, os.urandom(300), certificate_of(server)[:-70]):
        with pytest.raises(ForgedError):
            check_certificate(server.peer_id, other)


def test_name_in_a_certificate_proves_nothing(server: Identity) -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, server.peer_id)])
    key = Ed25519PrivateKey.generate()
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    own = _make_certificate(server)
    dated = builder.not_valid_before(own.not_valid_before_utc).not_valid_after(own.not_valid_after_utc)
    forged = dated.serial_number(own.serial_number).sign(key, None)
    with pytest.raises(ForgedError):
        check_certificate(server.peer_id, forged.public_bytes(Encoding.DER))


def test_certificate_of_another_version_is_refused(server: Identity) -> None:
    version = bytes([0xA0, 0x03, 0x02, 0x01])
    own = certificate_of(server)
    assert own.count(version + b"\x02") == 1
    with pytest.raises(ForgedError):
        check_certificate(server.peer_id, own.replace(version + b"\x02", version + b"\x06"))

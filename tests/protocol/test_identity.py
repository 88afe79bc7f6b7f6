"""The key file, peer ids and signatures."""

import multiprocessing
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import ForgedError, IdentityError, MalformedError
from protocol.identity import Identity, public_key, verify

pytestmark = pytest.mark.slow


def test_key_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "node" / "key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["key"], "no temporary file may remain"


def test_peer_id_has_the_libp2p_form() -> None:
    # p2pd itself derives this id from the key file; test_p2pd.py compares a fresh key with p2pd each time.
    identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    assert identity.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert Identity.create().peer_id.startswith("12D3KooW")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"mode {mode:04o}.*chmod 600 {path}$"):
        Identity.load_or_create(path)
    path.chmod(0o600)
    Identity.load_or_create(path)


def _damaged(content: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut": content[:-1],
        "longer": content + b"\0",
        "another type": b"\x08\x00" + content[2:],
        "another public key": content[:-1] + bytes([content[-1] ^ 1]),
    }


@pytest.mark.parametrize("damage", _damaged(b"....."))
def test_damaged_key_is_never_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    bad = _damaged(path.read_bytes())[damage]
    path.write_bytes(bad)
    with pytest.raises(IdentityError, match="not an Ed25519 key; restore"):
        Identity.load_or_create(path)
    assert path.read_bytes() == bad


def test_unusable_path_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match="cannot read the key .*Is a directory"):
        Identity.load_or_create(tmp_path)
    with pytest.raises(IdentityError, match="cannot read the key .*Not a directory"):
        Identity.load_or_create(tmp_path / "file" / "key")


def _load(path: Path) -> str:
    return Identity.load_or_create(path).peer_id


def test_processes_that_start_together_use_the_same_key(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        ids = pool.map(_load, [tmp_path / "key"] * 32, chunksize=1)
    assert len(set(ids)) == 1


def test_only_the_right_signature_verifies() -> None:
    identity, other = Identity.create(), Identity.create()
    signature = identity.sign(b"message")
    assert len(signature) == 64
    verify(identity.peer_id, b"message", signature)
    for peer_id, message, forged in (
        (identity.peer_id, b"messagf", signature),
        (other.peer_id, b"message", signature),
        (identity.peer_id, b"message", bytes(64)),
        (identity.peer_id, b"message", signature[:-1]),
        (identity.peer_id, b"message", b""),
    ):
        with pytest.raises(ForgedError):
            verify(peer_id, message, forged)


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # a hash of an RSA key
        "1" * 52,
        "z" * 52,
        "0" * 52,
        "\N{GREEK SMALL LETTER ALPHA}" * 52,
        "12D3KooW" + "1" * 44,
        "1" * 1_000_000,
    ],
)
def test_invalid_peer_ids_are_refused(peer_id: str) -> None:
    with pytest.raises(MalformedError):
        verify(peer_id, b"", bytes(64))


def test_only_the_canonical_form_of_a_peer_id_is_accepted() -> None:
    identity = Identity.create()
    public_key(identity.peer_id)
    name = identity.peer_id
    for other in (name + "\n", " " + name, name[:-1] + " ", name[:-1] + "\n", name.lower()):
        with pytest.raises(MalformedError):
            public_key(other)

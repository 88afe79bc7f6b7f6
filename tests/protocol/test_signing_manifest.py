"""The organiser's signature on a manifest."""

import random

import pytest

from protocol.errors import ManifestError, OrganiserError
from protocol.identity import Identity
from protocol.manifest import parse_manifest
from protocol.signing import fingerprint, open_signed_manifest, sign_manifest
from tests.node.small_run import MANIFEST

ORGANISER = Identity.create()


def test_signed_manifest_is_opened() -> None:
    signed = open_signed_manifest(sign_manifest(MANIFEST, ORGANISER), "here")
    assert signed.manifest == MANIFEST and signed.organiser == ORGANISER.peer_id


def test_signature_covers_scheduled_options() -> None:
    decay = {"start": 0.5, "end": 0.9, "rounds": 20}
    method = MANIFEST.method.model_copy(update={"feedback": {"decay": decay}, "codec": {"k": (decay, 3)}})
    changing = MANIFEST.model_copy(update={"method": method})
    text = sign_manifest(changing, ORGANISER)
    assert open_signed_manifest(text, "here").manifest == changing
    with pytest.raises(OrganiserError):
        open_signed_manifest(text.replace(b"rounds = 20", b"rounds = 21"), "here")


def test_signed_text_is_a_manifest_for_any_parser() -> None:
    assert parse_manifest(sign_manifest(MANIFEST, ORGANISER), "here") == MANIFEST


def test_unsigned_manifest_has_no_organiser() -> None:
    assert open_signed_manifest(MANIFEST.to_toml().encode(), "here").organiser is None


@pytest.mark.parametrize("seed", range(200))
def test_changed_byte_never_passes_as_signed(seed: int) -> None:
    """Control: without verification, a changed seed of the run would give a manifest like any other."""
    text = bytearray(sign_manifest(MANIFEST, ORGANISER))
    offset = random.Random(seed).randrange(len(text))
    text[offset] ^= 1 << random.Random(seed + 1).randrange(8)
    try:
        opened = open_signed_manifest(bytes(text), "here")
    except (OrganiserError, ManifestError):
        return
    assert opened.organiser is None


def test_signature_of_another_manifest_is_refused() -> None:
    text = sign_manifest(MANIFEST, ORGANISER)
    other = text.replace(b'name = "small"', b'name = "other"')
    assert parse_manifest(other, "here").run.name == "other"
    with pytest.raises(OrganiserError, match="not what 12D3KooW.* signed; get it again"):
        open_signed_manifest(other, "here")


def test_another_organisers_name_is_refused() -> None:
    text = sign_manifest(MANIFEST, ORGANISER).replace(ORGANISER.peer_id.encode(), Identity.create().peer_id.encode())
    with pytest.raises(OrganiserError):
        open_signed_manifest(text, "here")


def test_fingerprint_is_short_and_unique() -> None:
    other = Identity.create().peer_id
    assert len(fingerprint(other)) == 39 and fingerprint(other) != fingerprint(ORGANISER.peer_id)

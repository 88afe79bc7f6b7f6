"""The organiser's signature on a manifest."""

import random
import time
from collections.abc import Callable

import pytest

from protocol.errors import ManifestError, OrganiserError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.signing import TrustPoint, Voucher, fingerprint, open_signed_manifest, sign_manifest
from tests.node.small_run import MANIFEST

ORGANISER, HOST = Identity.create(), Identity.create()
STEERED = MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"organiser_key": ORGANISER.peer_id})})
VOUCHER = Voucher.issue(ORGANISER, STEERED.run_id, HOST.peer_id)


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


def test_trust_point_is_signed_with_the_manifest() -> None:
    trust = TrustPoint.of(40, bytes(32), bytes(32), bytes(32))
    text = sign_manifest(MANIFEST, ORGANISER, trust)
    signed = open_signed_manifest(text, "here")
    assert signed.trust == trust and signed.manifest == MANIFEST
    with pytest.raises(OrganiserError):
        open_signed_manifest(text.replace(b"# trust 40-", b"# trust 41-"), "here")
    unsigned = text[: text.index(b"# organiser")]
    assert open_signed_manifest(unsigned, "here").trust is None, "nobody vouches for it"
    assert open_signed_manifest(sign_manifest(MANIFEST, ORGANISER), "here").trust is None


@pytest.mark.parametrize("host", [HOST, Identity.create()])
def test_manifest_of_each_host_that_the_organiser_vouches_for_is_the_organisers(host: Identity) -> None:
    """Control: without the voucher, it is the host's own."""
    trust = TrustPoint.of(40, bytes(32), bytes(32), bytes(32))
    voucher = Voucher.issue(ORGANISER, STEERED.run_id, host.peer_id)
    signed = open_signed_manifest(sign_manifest(STEERED, host, trust, voucher), "here")
    assert (signed.manifest, signed.organiser, signed.trust) == (STEERED, ORGANISER.peer_id, trust)
    assert open_signed_manifest(sign_manifest(STEERED, host), "here").organiser == host.peer_id


def test_voucher_for_another_host_run_or_organiser_is_refused() -> None:
    stranger = Identity.create()
    forged = (
        sign_manifest(STEERED, stranger, None, VOUCHER),  # whose host signed nothing of this
        sign_manifest(STEERED, HOST, None, Voucher.issue(ORGANISER, MANIFEST.run_id, HOST.peer_id)),
        sign_manifest(STEERED, HOST, None, Voucher.issue(stranger, STEERED.run_id, HOST.peer_id)),
        sign_manifest(STEERED, HOST, None, Voucher(ORGANISER.peer_id, HOST.peer_id, bytes(64))),
        sign_manifest(MANIFEST, HOST, None, Voucher.issue(ORGANISER, MANIFEST.run_id, HOST.peer_id)),
    )
    for text in forged:
        with pytest.raises(OrganiserError, match="does not vouch for the host|is not what"):
            open_signed_manifest(text, "here")
    assert open_signed_manifest(sign_manifest(STEERED, HOST, None, VOUCHER), "here").organiser == ORGANISER.peer_id


@pytest.mark.parametrize("seed", range(200))
def test_changed_byte_of_a_vouched_manifest_never_passes(seed: int) -> None:
    text = bytearray(sign_manifest(STEERED, HOST, None, VOUCHER))
    offset = len(text) - 1 - random.Random(seed).randrange(340)
    text[offset] ^= 1 << random.Random(seed + 1).randrange(8)
    with pytest.raises((OrganiserError, ManifestError)):
        open_signed_manifest(bytes(text), "here")


def test_unsigned_manifest_has_no_organiser() -> None:
    assert open_signed_manifest(MANIFEST.to_toml().encode(), "here").organiser is None


@pytest.mark.parametrize("seed", range(200))
def test_changed_byte_never_passes_as_signed(seed: int) -> None:
    """It does not count as unsigned either. Control: most of these texts are manifests like any other."""
    text = bytearray(sign_manifest(MANIFEST, ORGANISER))
    offset = random.Random(seed).randrange(len(text))
    text[offset] ^= 1 << random.Random(seed + 1).randrange(8)
    with pytest.raises((OrganiserError, ManifestError)):
        open_signed_manifest(bytes(text), "here")


def test_signature_of_another_manifest_is_refused() -> None:
    text = sign_manifest(MANIFEST, ORGANISER)
    other = text.replace(b'name = "small"', b'name = "other"')
    assert parse_manifest(other, "here").run.name == "other"
    with pytest.raises(OrganiserError, match="not what 12D3KooW.* signed; get it again"):
        open_signed_manifest(other, "here")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "no last newline": lambda text: text[:-1],
    "trailing blank": lambda text: text[:-1] + b" \n",
    "trailing empty line": lambda text: text + b"\n",
    "trailing comment": lambda text: text + b"# end\n",
    "half a signature": lambda text: text[:-40],
    "only the organiser": lambda text: text[: text.rindex(b"# signature")],
    "only the signature": lambda text: text[: text.rindex(b"# organiser")] + text[text.rindex(b"# signature") :],
    "indented": lambda text: text.replace(b"# ", b"  # "),
    "other blanks": lambda text: text.replace(b"# ", "#\u00a0".encode()),
    "no blanks": lambda text: text.replace(b"# ", b"#"),
    "upper case": lambda text: text.replace(b"# organiser", b"# ORGANISER").replace(b"# signature", b"# Signature"),
    "above the text": lambda text: (parts := text.partition(b"# organiser"))[1] + parts[2] + parts[0],
    "twice": lambda text: text + text[text.rindex(b"# organiser") :],
    "on one line": lambda text: text.replace(b"\n# ", b" # "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_signature_does_not_count_as_absent(damage: str) -> None:
    """Control: apart from the comments, the changed text is a valid manifest."""
    altered = sign_manifest(MANIFEST, ORGANISER).replace(b"learning_rate = 0.01", b"learning_rate = 0.5")
    text = DAMAGES[damage](altered)
    assert parse_manifest(text, "here").train.learning_rate == 0.5
    with pytest.raises(OrganiserError, match="here: .*(begins like a signature|is not what 12D3)"):
        open_signed_manifest(text, "here")


@pytest.mark.parametrize("line", [b"#", b"# ", b"#organiser", b"# organiser ", b"organiser", b"# signature"])
def test_hostile_line_is_refused_in_no_time(line: bytes) -> None:
    """Control: a pattern with a repetition inside another one takes minutes for the first of these."""
    before = time.process_time()
    with pytest.raises((OrganiserError, ManifestError)):
        open_signed_manifest(line * (60_000 // len(line)) + b"\n= 1", "here")
    assert time.process_time() - before < 2


@pytest.mark.parametrize(
    "comment", ['# organiser = "Ada"', "# organiser_key", "# organisers", "# organiser of it", "# a signature", "#"]
)
def test_other_comments_are_no_signature(comment: str) -> None:
    assert open_signed_manifest(f"{comment}\n{MANIFEST.to_toml()}".encode(), "here").organiser is None


def test_another_organisers_name_is_refused() -> None:
    text = sign_manifest(MANIFEST, ORGANISER).replace(ORGANISER.peer_id.encode(), Identity.create().peer_id.encode())
    with pytest.raises(OrganiserError):
        open_signed_manifest(text, "here")


def test_fingerprint_is_short_and_unique() -> None:
    other = Identity.create().peer_id
    assert len(fingerprint(other)) == 39 and fingerprint(other) != fingerprint(ORGANISER.peer_id)

"""The pinned key of the organiser, and runs that resume without their source."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.commands.join import invitation
from node.commands.join.invitation import (
    INVITATION_FILE,
    Invitation,
    check_pin,
    open_or_recall,
    recall_invitation,
    save_invitation,
)
from node.commands.join.invitation import MANIFEST_FILE as KEPT
from node.paths import state_home
from protocol.errors import ManifestError, MissingFileError, OrganiserError, UnreachableError
from protocol.identity import Identity
from protocol.signing import Voucher, fingerprint, open_signed_manifest, sign_manifest
from tests.node.small_run import MANIFEST

FIRST, OTHER = (Identity.create().peer_id for _ in range(2))
URL = "https://run.example.org/run.toml"
INVITATION = Invitation(MANIFEST, FIRST, None, source=URL)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (state_home() / "small-1").mkdir(parents=True)
    return state_home() / "small-1"


def test_key_is_new_only_once(home: Path) -> None:
    assert check_pin(home, INVITATION)
    save_invitation(home, INVITATION)
    assert not check_pin(home, INVITATION)


def test_other_key_for_the_same_folder_is_refused_with_advice(home: Path) -> None:
    """Control: without the pin, the other key is accepted."""
    changed = replace(INVITATION, organiser=OTHER)
    assert check_pin(home, changed)
    save_invitation(home, INVITATION)
    with pytest.raises(OrganiserError) as refused:
        check_pin(home, changed)
    text = str(refused.value)
    assert (
        fingerprint(OTHER) in text
        and fingerprint(FIRST) in text
        and str(home / INVITATION_FILE) in text
        and "\n" not in text
    )


def test_other_key_at_the_same_url_is_refused(home: Path) -> None:
    """Control: another organiser at another URL is accepted."""
    save_invitation(home, INVITATION)
    elsewhere = state_home() / "other-2"
    with pytest.raises(OrganiserError, match=f"remove {home / INVITATION_FILE}"):
        check_pin(elsewhere, replace(INVITATION, organiser=OTHER))
    assert check_pin(elsewhere, replace(INVITATION, organiser=OTHER, source="https://other.example.org/run.toml"))


def test_unsigned_file_pins_nothing(home: Path) -> None:
    save_invitation(home, INVITATION)
    assert not check_pin(home, Invitation(MANIFEST, None, Path("/")))


def test_damaged_pin_is_not_treated_as_missing(home: Path) -> None:
    (home / INVITATION_FILE).write_text("{")
    with pytest.raises(OrganiserError, match="cannot read .*; restore it"):
        check_pin(home, INVITATION)


def test_run_is_recalled_by_its_url(home: Path, tmp_path: Path) -> None:
    save_invitation(home, INVITATION)
    assert recall_invitation(URL, None) is None, "its manifest was never kept"
    (home / KEPT).write_text(MANIFEST.to_toml())
    assert recall_invitation(URL, None) == recall_invitation(URL, home) == replace(INVITATION, folder=home)
    assert recall_invitation(URL, tmp_path / "elsewhere") is None and recall_invitation(f"{URL}2", None) is None


def test_unsigned_source_does_not_remove_a_pin(home: Path) -> None:
    save_invitation(home, INVITATION)
    save_invitation(home, Invitation(MANIFEST, None, Path("/"), source="/run.toml"))
    assert not check_pin(home, INVITATION)
    with pytest.raises(OrganiserError):
        check_pin(home, replace(INVITATION, organiser=OTHER))


def test_run_of_a_file_that_is_gone_is_recalled_from_its_folder(home: Path, tmp_path: Path) -> None:
    """Control: a file that was never joined, and one that is damaged, are errors."""
    run = tmp_path / "mine.toml"
    run.write_text(MANIFEST.to_toml())
    (home / KEPT).write_text(MANIFEST.to_toml())
    save_invitation(home, open_or_recall(str(run), None, False))
    run.unlink()
    assert open_or_recall(str(run), None, False).base == tmp_path
    with pytest.raises(MissingFileError):
        open_or_recall(str(tmp_path / "other.toml"), None, False)
    run.write_text("[run")
    with pytest.raises(ManifestError):
        open_or_recall(str(run), None, False)


def test_run_of_a_url_that_serves_something_else_is_recalled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / KEPT).write_text(MANIFEST.to_toml())
    save_invitation(home, replace(INVITATION, source="http://127.0.0.1:9/run.toml"))
    for served in (b"[run", b"#" * 100_000):
        monkeypatch.setattr(invitation, "_download", lambda url, served=served: served)
        assert open_or_recall("http://127.0.0.1:9/run.toml", None, False).manifest == MANIFEST
    for served in (MANIFEST.to_toml().encode(), sign_manifest(MANIFEST, Identity.create())[:-1]):
        monkeypatch.setattr(invitation, "_download", lambda url, served=served: served)
        with pytest.raises(OrganiserError):
            open_or_recall("http://127.0.0.1:9/run.toml", None, False)


def test_link_is_recalled_whichever_peer_it_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(run_id: str, address: str) -> bytes:
        raise UnreachableError(f"no answer from {address}")

    monkeypatch.setattr(invitation, "_request_manifest", refuse)
    links = [f"murmur://{MANIFEST.run_id}@/ip4/10.0.0.{host}/tcp/1/p2p/{FIRST}" for host in (1, 2)]
    (home / KEPT).write_text(MANIFEST.to_toml())
    save_invitation(home, Invitation(MANIFEST, None, None, source=links[0]))
    assert open_or_recall(links[1], None, False).peers == (f"/ip4/10.0.0.2/tcp/1/p2p/{FIRST}",)


def test_folder_of_a_node_resumes_its_run(home: Path, tmp_path: Path) -> None:
    """Control: a folder in which no node has run is not a run."""
    save_invitation(home, replace(INVITATION, base=tmp_path))
    with pytest.raises(MissingFileError):
        open_or_recall(str(home), None, False)
    (home / KEPT).write_text(MANIFEST.to_toml())
    (home / "key").touch()
    resumed = open_or_recall(str(home), None, False)
    assert (resumed.folder, resumed.base, resumed.organiser) == (home, tmp_path, FIRST)


ORGANISER, OLD_HOST, NEW_HOST = (Identity.create() for _ in range(3))
STEERED = MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"organiser_key": ORGANISER.peer_id})})


def served(host: Identity, organiser: Identity | None) -> Invitation:
    """Return what a host of the steered run serves, with the voucher of an organiser if there is one."""
    manifest = STEERED
    if organiser is not None:
        run = STEERED.run.model_copy(update={"organiser_key": organiser.peer_id})
        manifest = STEERED.model_copy(update={"run": run})
    voucher = None if organiser is None else Voucher.issue(organiser, manifest.run_id, host.peer_id)
    signed = open_signed_manifest(sign_manifest(manifest, host, None, voucher), URL)
    return Invitation(signed.manifest, signed.organiser, None, source=URL)


def test_run_that_moves_to_another_host_of_its_organiser_is_joined_without_a_question(home: Path) -> None:
    """Controls: a host for which nobody vouches, and another organiser at the same URL, are refused."""
    assert check_pin(home, served(OLD_HOST, ORGANISER))
    save_invitation(home, served(OLD_HOST, ORGANISER))
    assert not check_pin(home, served(NEW_HOST, ORGANISER))
    for stranger in (served(NEW_HOST, None), served(NEW_HOST, Identity.create())):
        with pytest.raises(OrganiserError, match="ask the organiser; if the new key is right, remove") as refused:
            check_pin(home, stranger)
        assert refused.value.exit_code == 14 and fingerprint(ORGANISER.peer_id) in str(refused.value)


def test_organiser_that_vouches_for_its_host_later_takes_the_place_of_the_hosts_key(home: Path) -> None:
    """The run that was joined names the organiser. Control: before the run was kept, another key is refused."""
    save_invitation(home, served(OLD_HOST, None))
    with pytest.raises(OrganiserError):
        check_pin(home, served(OLD_HOST, ORGANISER))
    (home / KEPT).write_text(STEERED.to_toml())
    assert not check_pin(home, served(NEW_HOST, ORGANISER))
    with pytest.raises(OrganiserError):
        check_pin(home, served(NEW_HOST, None))

"""The pinned key of the organiser."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.join.invitation import MANIFEST_FILE as KEPT
from node.join.invitation import ORGANISER_FILE, Invitation, check_pin, recall_invitation, save_pin
from node.paths import state_home
from protocol.errors import OrganiserError
from protocol.identity import Identity
from protocol.signing import fingerprint
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
    save_pin(home, INVITATION)
    assert not check_pin(home, INVITATION)


def test_other_key_for_the_same_folder_is_refused_with_advice(home: Path) -> None:
    """Control: without the pin, the other key is accepted."""
    changed = replace(INVITATION, organiser=OTHER)
    assert check_pin(home, changed)
    save_pin(home, INVITATION)
    with pytest.raises(OrganiserError) as refused:
        check_pin(home, changed)
    text = str(refused.value)
    assert (
        fingerprint(OTHER) in text
        and fingerprint(FIRST) in text
        and str(home / ORGANISER_FILE) in text
        and "\n" not in text
    )


def test_other_key_at_the_same_url_is_refused(home: Path) -> None:
    """Control: another organiser at another URL is accepted."""
    save_pin(home, INVITATION)
    elsewhere = state_home() / "other-2"
    with pytest.raises(OrganiserError, match=f"remove {home / ORGANISER_FILE}"):
        check_pin(elsewhere, replace(INVITATION, organiser=OTHER))
    assert check_pin(elsewhere, replace(INVITATION, organiser=OTHER, source="https://other.example.org/run.toml"))


def test_unsigned_file_pins_nothing(home: Path) -> None:
    save_pin(home, INVITATION)
    assert not check_pin(home, Invitation(MANIFEST, None, Path("/")))


def test_damaged_pin_is_not_treated_as_missing(home: Path) -> None:
    (home / ORGANISER_FILE).write_text("{")
    with pytest.raises(OrganiserError, match="cannot read .*; restore it"):
        check_pin(home, INVITATION)


def test_run_is_recalled_by_its_url(home: Path, tmp_path: Path) -> None:
    save_pin(home, INVITATION)
    assert recall_invitation(URL, None) is None, "its manifest was never kept"
    (home / KEPT).write_text(MANIFEST.to_toml())
    assert recall_invitation(URL, None) == recall_invitation(URL, home) == INVITATION
    assert recall_invitation(URL, tmp_path / "elsewhere") is None and recall_invitation(f"{URL}2", None) is None

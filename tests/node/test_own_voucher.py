"""The voucher of a host: signed by the organiser's key on this machine, or brought as a file."""

import shutil
from pathlib import Path

import pytest

from node.commands.tickets import TicketOptions, run_tickets
from node.own_voucher import find_voucher
from node.paths import organiser_key_path
from node.run_dir import RunDir
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from tests.node.small_run import MANIFEST

HOST, OTHER_HOST = (Identity.create().peer_id for _ in range(2))


@pytest.fixture
def organiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    organiser_key_path().parent.mkdir(parents=True)
    return Identity.load_or_create(organiser_key_path())


def steered_by(key: str) -> Manifest:
    return MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"organiser_key": key})})


def test_key_on_this_machine_vouches_for_each_host_and_the_voucher_stays(organiser: Identity, tmp_path: Path) -> None:
    """Controls: another organiser's run, and a run without one."""
    manifest, folder = steered_by(organiser.peer_id), RunDir(tmp_path)
    for host in (HOST, OTHER_HOST):  # the second one finds the first one's voucher
        voucher = find_voucher(manifest, folder, host)
        assert voucher is not None and voucher.host == host
        voucher.verify(manifest.run_id)
    organiser_key_path().unlink()
    assert find_voucher(manifest, folder, OTHER_HOST) == voucher
    assert find_voucher(manifest, folder, HOST) is None
    assert find_voucher(steered_by(Identity.create().peer_id), folder, HOST) is None
    assert find_voucher(MANIFEST, folder, HOST) is None


def test_organiser_elsewhere_writes_the_voucher_to_a_file(organiser: Identity, tmp_path: Path) -> None:
    """The host, which has no organiser's key, saves it in its folder; a damaged one is not used."""
    run, line = tmp_path / "run.toml", tmp_path / "line"
    manifest = steered_by(organiser.peer_id)
    run.write_text(manifest.to_toml())
    run_tickets(TicketOptions(run=str(run), holder=HOST, host=True, out=line))
    with pytest.raises(UsageError, match="--host needs the KEY of a host"):
        run_tickets(TicketOptions(run=str(run), host=True))
    organiser_key_path().unlink()
    assert find_voucher(manifest, RunDir(tmp_path), HOST) is None
    shutil.copy(line, RunDir(tmp_path).voucher)
    found = find_voucher(manifest, RunDir(tmp_path), HOST)
    assert found is not None and found.organiser == organiser.peer_id
    RunDir(tmp_path).voucher.write_text(line.read_text()[:-9])
    assert find_voucher(manifest, RunDir(tmp_path), HOST) is None

"""The checks of `murmur doctor`, each on a suitable machine and on an unsuitable one."""

import json
from pathlib import Path

import pytest
import torch

from node.commands.doctor import checks, command
from node.commands.doctor.checks import Check
from node.commands.doctor.command import doctor, run_checks
from protocol.identity import Identity
from tests.node.small_run import MANIFEST

RUN = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"vocabulary": 256})})  # bytes
NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"  # no listener


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the probe of the real network."""

    async def network(*_: object) -> list[Check]:
        return [Check("ports", "ok", "open")]

    monkeypatch.setattr(command, "probe_network", network)


def written(folder: Path) -> str:
    (folder / "run.toml").write_text(RUN.to_toml())
    return str(folder / "run.toml")


def test_free_memory_is_positive() -> None:
    assert checks.free_memory() > 1e6


def test_container_limits_reduce_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    free = checks.free_memory()
    monkeypatch.setattr(checks, "cgroup_memory_left", lambda: 7)
    monkeypatch.setattr(checks, "cgroup_cores", lambda: 0.5)
    monkeypatch.setattr(checks, "choose_device", lambda _: torch.device("cpu"))
    assert checks.free_memory() == 7 < free and "0.5 cores" in checks.check_device().found


def test_run_is_checked_and_exit_code_shows_the_result(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path)
    code = doctor(run, tmp_path / "node", (), False, True)
    findings = {found["check"]: found for found in json.loads(capsys.readouterr().out)}
    checks = {"version", "device", "run", "key", "data", "model", "memory", "disk", "speed", "clock", "ports"}
    assert checks == set(findings)
    assert code == (1 if any(found["level"] == "fail" for found in findings.values()) else 0)
    assert not (tmp_path / "node").exists()
    assert doctor(run, tmp_path / "node", (), False, False) == code
    assert "-> name existing text files" in capsys.readouterr().out


def test_text_is_read_and_a_missing_one_is_a_failure(quick: None, tmp_path: Path) -> None:
    run = written(tmp_path)

    def data_finding() -> Check:
        return next(found for found in run_checks(run, tmp_path / "node", (), False) if found.check == "data")

    assert data_finding() == Check(
        "data", "fail", f"no file matches data.path '*.txt' in {tmp_path}", "name existing text files"
    )
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text("words to train on\n" * 10)
    assert data_finding() == Check(
        "data", "ok", f'40 documents, 7.2k tokens; sample: "{("words to train on " * 4)[:57]}..."'
    )
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    found = data_finding()
    assert found.level == "warn" and "latin.txt: not UTF-8" in found.found


def test_text_from_peers_does_not_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: the JSON has it, escaped."""

    async def network(*_: object) -> list[Check]:
        return [Check("ports", "warn", "no\x1b[2Jway")]

    monkeypatch.setattr(command, "probe_network", network)
    doctor(None, tmp_path, (), False, False)
    told = capsys.readouterr().out
    assert "no\ufffd[2Jway" in told and "\x1b[2J" not in told
    doctor(None, tmp_path, (), False, True)
    assert "no\\u001b[2Jway" in capsys.readouterr().out


def test_unavailable_run_is_a_finding(quick: None, tmp_path: Path) -> None:
    last = run_checks(str(tmp_path / "none.toml"), None, (), False)[-1]
    assert (last.check, last.level, last.mend) == ("run", "fail", "name an existing file")


def test_unknown_method_is_a_finding(quick: None, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.to_toml().replace('recipe = "', 'recipe = "x'))
    assert doctor(str(tmp_path / "run.toml"), None, (), False, False) == 1
    last = run_checks(str(tmp_path / "run.toml"), None, (), False)[-1]
    assert (last.check, last.level) == ("run", "fail") and last.mend.startswith("did you mean")


def test_key_is_not_checked_without_a_folder(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Identity.load_or_create(tmp_path / "key")
    assert "key" not in {found.check for found in run_checks(None, None, (), False)}
    assert "key" in {found.check for found in run_checks(None, tmp_path, (), False)}


def test_key_that_other_users_can_read_is_a_finding(quick: None, tmp_path: Path) -> None:
    """Control: with the right mode, the same key is ok."""
    identity = Identity.load_or_create(tmp_path / "key")

    def key() -> Check:
        return next(found for found in run_checks(None, tmp_path, (), False) if found.check == "key")

    assert (key().level, key().found) == ("ok", identity.peer_id)
    (tmp_path / "key").chmod(0o644)
    assert key().level == "fail" and key().mend.startswith("run: chmod 600")


def test_real_network_is_probed(tmp_path: Path) -> None:
    run = RUN.run.model_copy(update={"bootstrap": (NOWHERE,)})
    (tmp_path / "run.toml").write_text(RUN.model_copy(update={"run": run}).to_toml())
    findings = {found.check: found for found in run_checks(str(tmp_path / "run.toml"), tmp_path / "node", (), False)}
    assert findings["peers"].level == "fail" and "cannot reach" in findings["peers"].found
    assert findings["ports"].level in ("ok", "warn")

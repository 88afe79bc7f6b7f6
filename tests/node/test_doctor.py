"""The checks of `murmur doctor`, each on a machine that is fit and on one that is not."""

import json
from pathlib import Path

import pytest

from node import doctor as module
from node.doctor import (
    Finding,
    doctor,
    examine,
    free_memory,
    judged_addresses,
    judged_clock,
    judged_microbatch,
    judged_peers,
    judged_room,
)
from protocol.identity import Identity
from tests.node.small_run import MANIFEST

NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"  # nobody listens


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at the real network."""

    async def network(_: object) -> list[Finding]:
        return [Finding("ports", "ok", "open")]

    monkeypatch.setattr(module, "_network", network)


def written(folder: Path) -> str:
    (folder / "run.toml").write_text(MANIFEST.to_toml())
    return str(folder / "run.toml")


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (judged_room("disk", 5e9, 4e9, "free some"), "ok"),
        (judged_room("disk", 3e9, 4e9, "free some"), "fail"),
        (judged_clock(2.0), "ok"),
        (judged_clock(-30.0), "warn"),
        (judged_clock(3600.0), "fail"),
        (judged_addresses(["/ip4/10.0.0.3/tcp/1", "/ip4/8.8.8.8/tcp/1"]), "ok"),
        (judged_addresses(["/ip4/10.0.0.3/tcp/1", "/ip6/fe80::1/tcp/1", "/dns/x/tcp/1"]), "warn"),
        (judged_peers([(NOWHERE, 0.2), (NOWHERE, "no")]), "ok"),
        (judged_peers([(NOWHERE, "no")]), "fail"),
        (judged_peers([]), "warn"),
        (judged_microbatch(MANIFEST, 1e9, "cpu"), "ok"),
        (judged_microbatch(MANIFEST, 4e4, "cuda"), "warn"),
        (judged_microbatch(MANIFEST, 0.0, "cpu"), "fail"),
    ],
)
def test_what_is_not_ok_has_a_mend(finding: Finding, level: str) -> None:
    assert finding.level == level and finding.found and bool(finding.mend) == (level != "ok")


def test_there_is_some_memory_here() -> None:
    assert free_memory() > 1e6


def test_a_run_is_examined_and_the_exit_code_says_how_it_went(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path)
    code = doctor(run, tmp_path / "node", False, True)
    findings = {found["check"]: found for found in json.loads(capsys.readouterr().out)}
    assert {"version", "device", "run", "key", "model", "memory", "disk", "clock", "ports"} == set(findings)
    assert code == (1 if any(found["level"] == "fail" for found in findings.values()) else 0)
    assert not (tmp_path / "node").exists()
    assert doctor(run, tmp_path / "node", False, False) == code and "what to do" in capsys.readouterr().out


def test_a_run_that_cannot_be_had_is_a_finding(quick: None, tmp_path: Path) -> None:
    last = examine(str(tmp_path / "none.toml"), None, False)[-1]
    assert (last.check, last.level, last.mend) == ("run", "fail", "name an existing file")


def test_a_key_that_others_can_read(quick: None, tmp_path: Path) -> None:
    """The control: with the right mode, the same key is fine."""
    identity = Identity.load_or_create(tmp_path / "key")

    def key() -> Finding:
        return next(found for found in examine(None, tmp_path, False) if found.check == "key")

    assert (key().level, key().found) == ("ok", identity.peer_id)
    (tmp_path / "key").chmod(0o644)
    assert key().level == "fail" and key().mend.startswith("run: chmod 600")


def test_the_real_network_is_asked(tmp_path: Path) -> None:
    run = MANIFEST.run.model_copy(update={"bootstrap": (NOWHERE,)})
    (tmp_path / "run.toml").write_text(MANIFEST.model_copy(update={"run": run}).to_toml())
    findings = {found.check: found for found in examine(str(tmp_path / "run.toml"), tmp_path / "node", False)}
    assert findings["peers"].level == "fail" and "cannot reach" in findings["peers"].found
    assert findings["ports"].level in ("ok", "warn")

"""`murmur plan`: the table fits the terminal, the JSON has all figures, and hosts and joiners warn in one line."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from node.commands.capacity import estimate_needs, workload_of
from node.commands.plan.arithmetic import predict
from node.commands.plan.command import describe_if_poor, plan, warn_if_poor
from node.commands.plan.peers import typical_peers
from node.commands.plan.report import plan_values, print_plan
from protocol.errors import ManifestError, MissingFileError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import ReinforcementSection
from tests.node.commands.plan.plans import peer, run_of

EVERYWHERE, HERE = ("/ip4/0.0.0.0/tcp/0",), ("/ip4/127.0.0.1/tcp/0",)
PEERS = '[[peer]]\nname = "card"\ncount = 12\ntflops = 20\nup = "100mbit"\ndown = "100mbit"\nmemory = "24GB"\n'
LARGE_STEPS = {"stages": 1, "layers": 4, "width": 1024, "batch_tokens": 2**24}


@pytest.mark.parametrize("manifest", [run_of(), run_of(stages=1), run_of(stages=64, layers=128)])
def test_table_fits_a_terminal_of_80_columns(manifest: Manifest) -> None:
    work = workload_of(manifest)
    kinds = (*typical_peers(manifest, work.parameters), peer(name="a name of 32 characters, at most"))
    screen = io.StringIO()
    print_plan(work, kinds, predict(work, kinds), Console(file=screen, width=80))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and any("of ideal" in line for line in lines)
    assert any(line.startswith(" all") for line in lines) and len(lines) < 80


def test_json_has_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(run_of().to_toml())
    (tmp_path / "peers.toml").write_text(PEERS)
    plan(str(tmp_path / "run.toml"), tmp_path / "peers.toml", insecure=False, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["links_by_format"]["bf16"] == pytest.approx(0.19, abs=0.005)
    assert set(found["limits"]) == {"links", "stages", "window", "step", "round"}
    assert 0 < found["fraction_of_ideal"] <= found["limits"]["links"]
    assert [stage["upload_bytes"] for stage in found["stages"]] == [2**23, 2**24, 2**24, 2**23]
    assert found["peers"][0]["upload_seconds"] == pytest.approx(1.34, abs=0.01)
    assert found["peers"][0]["needed_memory"] < found["peers"][0]["memory"] and found["warnings"]


def test_unusable_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        plan(str(tmp_path / "none.toml"), None, insecure=False, as_json=False)
    (tmp_path / "run.toml").write_text(run_of().to_toml().replace("frugal", "unknown"))
    with pytest.raises(ManifestError, match="method.recipe"):
        plan(str(tmp_path / "run.toml"), None, insecure=False, as_json=False)


def test_poor_layout_is_one_line_and_a_good_one_is_none(caplog: pytest.LogCaptureFixture) -> None:
    line = describe_if_poor(run_of())
    assert line.startswith("typical volunteers can use 0.0") and "activations take the links longer" in line
    assert "\n" not in line
    assert "does not hold this run's model" in describe_if_poor(run_of(stages=1, width=8192))
    assert describe_if_poor(run_of(**LARGE_STEPS)) == ""
    warn_if_poor(run_of(), EVERYWHERE)
    assert caplog.messages == [line]


def test_peers_of_one_machine_are_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_poor(run_of(), HERE)
    assert not caplog.messages


def test_plan_of_a_run_that_learns_from_scores_says_the_memory_of_a_rollout_peer() -> None:
    rl = ReinforcementSection(task="reverse", answer_tokens=8)
    manifest = run_of(stages=1).model_copy(update={"rl": rl})
    work = workload_of(manifest)
    kinds = typical_peers(manifest, work.parameters)
    screen = io.StringIO()
    print_plan(work, kinds, predict(work, kinds), Console(file=screen, width=80))
    assert "--role rollout" in screen.getvalue()
    needed = plan_values(work, kinds, predict(work, kinds))["rollout_peer_memory"]
    assert 0 < needed < estimate_needs(manifest, "cpu").memory, "it has no gradient and no moments"
    assert "rollout_peer_memory" not in plan_values(workload_of(run_of()), kinds, predict(workload_of(run_of()), kinds))

"""A method of the user in a swarm of real processes: daemons and trainers import the file that the user names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from node.own_modules import find_module
from protocol.manifest.reading import load_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"
RUN = """
[run]
name = "own"
[model]
width = 32
layers = 1
heads = 2
hidden = 64
context = 32
[data]
source = "python-stdlib"
[train]
batch_tokens = 256
learning_rate = 3e-3
[method]
recipe = "averaging"
schedule = { inner_steps = 60 }
codec = { kind = "ternary" }
modules = ["own_method"]
[target]
rounds = 4
"""


def test_two_peers_train_with_the_codec_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-P", "-m", "node.cli", "up", "run.toml", "--peers", "2", "--dir", "own", "--json"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 18 and "add --import own_method.py" in refused.stderr
    ended = subprocess.run(
        [*command, "--import", str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["validation_loss"] < report["initial_validation_loss"], report
    assert load_manifest(tmp_path / "own" / "run.toml").method.modules == (find_module(str(EXAMPLE)).line,)

"""The recipes for Kubernetes, SkyPilot and Slurm: checked by schema-like rules, by murmur itself and by a dry run."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from node.cli import app

FOLDER = Path(__file__).parents[2] / "docker"
STATEFUL, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
POD: dict[str, Any] = STATEFUL["spec"]["template"]["spec"]
SKY: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
SKY_KEYS = {"name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "workdir", "setup", "run"}
SKY_RESOURCES = {"accelerators", "cpus", "memory", "disk_size", "use_spot", "image_id", "ports", "infra", "any_of"}
pytestmark = pytest.mark.slow


def understand(*words: str) -> None:
    """Let murmur parse a command line without running it; an unknown flag raises."""
    command, *rest = words
    get_command(app).commands[command].make_context(command, list(rest))  # type: ignore[attr-defined]


def test_kubernetes_has_what_a_stateful_set_needs() -> None:
    assert (STATEFUL["apiVersion"], STATEFUL["kind"]) == ("apps/v1", "StatefulSet")
    spec, (container,) = STATEFUL["spec"], POD["containers"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["serviceName"] == SERVICE["metadata"]["name"] and SERVICE["spec"]["clusterIP"] == "None"
    volumes = {one["name"] for one in POD["volumes"]} | {
        one["metadata"]["name"] for one in spec["volumeClaimTemplates"]
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert POD["terminationGracePeriodSeconds"] >= 60, "a checkpoint is written at the end"
    ports = {port["containerPort"] for port in container["ports"]}
    assert ports == {int(spec["template"]["metadata"]["annotations"]["prometheus.io/port"])}


def test_pods_have_no_rights() -> None:
    (container,) = POD["containers"]
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] == 10001
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]} and not POD["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & POD.keys()


def test_pods_say_what_murmur_understands() -> None:
    (container,) = POD["containers"]
    named = {entry["name"] for entry in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) == named
    understand(*container["args"])
    for probe in ("startupProbe", "livenessProbe"):
        program, *words = container[probe]["exec"]["command"]
        assert program == "murmur"
        understand(*words)


def test_skypilot_task_has_known_keys_and_commands() -> None:
    assert SKY.keys() <= SKY_KEYS and SKY["resources"].keys() <= SKY_RESOURCES
    for script in (SKY["setup"], SKY["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert set(re.findall(r"\$(\w+)", script)) - {"SKYPILOT_NODE_RANK"} <= SKY["envs"].keys()
    words = SKY["run"].partition("bin/murmur ")[2].split()
    understand(*(word.strip('"') for word in words))


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
scontrol*) printf 'head\\nsecond\\nthird\\n' ;;
"srun "*" join "*)
    for word; do case $word in --output=*) log=${word#--output=} ;; esac; done
    [ -z "${log:-}" ] || echo "other machines of this site: murmur rank head:29400 --token SECRET" > "$log"
    sleep 3 ;;
"srun "*" rank "*) echo "token $MURMUR_SITE_TOKEN" >> "$CALLS" ;;
esac
"""


def dry_run(folder: Path, nodes: int) -> list[str]:
    """Run the script with a stand-in for Slurm; return the calls."""
    (folder / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (folder / "bin" / name).write_text(STAND_IN)
        (folder / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "n",
        "SLURM_JOB_ID": "7",
        "CALLS": f"{folder}/calls",
    }
    environment = os.environ | slurm | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    script = ["bash", str(FOLDER / "slurm.sh"), "https://run.example.org/run.toml"]
    subprocess.run(script, cwd=folder, env=environment, check=True, timeout=60)
    return (folder / "calls").read_text().splitlines()


def test_slurm_gives_the_token_of_the_first_machine_to_the_others(tmp_path: Path) -> None:
    calls = dry_run(tmp_path, 3)
    (join,) = (call for call in calls if " join " in call)
    (rank,) = (call for call in calls if " rank " in call)
    assert "--nodelist=head" in join and "--site head:29400" in join and "--exclude=head" in rank
    assert "--nodes=2 --ntasks=2" in rank and "token SECRET" in calls and "SECRET" not in rank
    for call in (join, rank):
        understand(*call.partition("murmur ")[2].split())


def test_slurm_on_one_machine_needs_no_site(tmp_path: Path) -> None:
    (call,) = dry_run(tmp_path, 1)
    assert call.startswith("srun murmur join") and "--site" not in call
    understand(*call.partition("murmur ")[2].split())

"""The workflows of the public forge: valid for its schema, and about things that exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
MATRIX = re.compile(r"\$\{\{.*?\}\}")
UNTRUSTED = re.compile(r"\$\{\{\s*(github\.(?:ref_name|head_ref|event)|inputs|matrix)")
pytestmark = pytest.mark.slow


def read(path: Path) -> dict[Any, Any]:
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


JOBS = {(path.stem, name): job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}
SCRIPTS = [(*job, step["run"]) for job, values in JOBS.items() for step in values.get("steps", ()) if "run" in step]


def schema_faults(path: Path) -> str:
    pytest.importorskip("check_jsonschema", reason="in the test extra")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return checked.stdout if checked.returncode else ""


def test_workflows_fit_the_schema_of_the_forge(tmp_path: Path) -> None:
    assert [path.name for path in WORKFLOWS] == ["release.yaml", "test.yaml"]
    assert [schema_faults(path) for path in WORKFLOWS] == ["", ""]
    broken = tmp_path / "broken.yaml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:"))
    assert "runs_on" in schema_faults(broken), "the control"


@pytest.mark.parametrize("job", JOBS, ids="-".join)
def test_job_waits_for_jobs_that_exist_and_ends(job: tuple[str, str]) -> None:
    values, names = JOBS[job], {name for workflow, name in JOBS if workflow == job[0]}
    needs = values.get("needs", [])
    assert {needs} <= names if isinstance(needs, str) else set(needs) <= names
    if "uses" in values:
        assert (ROOT / values["uses"]).is_file()
    else:
        assert values["timeout-minutes"] <= 120
    for step in values.get("steps", ()):
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"]), "a version is named"


@pytest.mark.parametrize(("workflow", "job", "script"), SCRIPTS)
def test_script_is_shell_without_text_of_strangers(workflow: str, job: str, script: str) -> None:
    """Values of the forge come by the environment: inside of a script, a name of a branch would be run."""
    assert not UNTRUSTED.search(script)
    subprocess.run(["bash", "-n"], input=MATRIX.sub("x", script), text=True, check=True)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\s*make (\w+)", script, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_nothing_is_published_before_everything_is_green() -> None:
    release = {name: job for (workflow, name), job in JOBS.items() if workflow == "release"}

    def before(name: str) -> set[str]:
        needs = release[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(one) for one in direct))

    assert {"test", "build", "install", "image"} <= before("publish") and {"test", "install"} <= before("image")
    assert release["publish"]["permissions"]["id-token"] == "write", "trusted publishing: no token is stored"
    texts = "".join(path.read_text() for path in WORKFLOWS)
    assert set(re.findall(r"secrets\.(\w+)", texts)) <= {"GITHUB_TOKEN"}
    assert read(ROOT / ".github/workflows/release.yaml")["permissions"] == {"contents": "read"}


def test_macos_is_tried_and_promises_nothing() -> None:
    macos = JOBS["test", "macos"]
    assert macos["continue-on-error"] is True and "experimental" in macos["name"] and "macos" in macos["runs-on"]
    assert "experimental" in (ROOT / "docs" / "user" / "macos.md").read_text().splitlines()[0]


def test_every_python_of_the_metadata_is_tested_and_installed() -> None:
    named = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    assert named == set(JOBS["release", "install"]["strategy"]["matrix"]["python"])
    assert named - {"3.11"} == set(JOBS["test", "quick"]["strategy"]["matrix"]["python"])

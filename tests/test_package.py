"""The wheel and the sdist hold what they must, and the wheel trains without the repository."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the build backend is in the test extra")
pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("murmuration", "node", "protocol", "optim")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build as `python -m build --no-isolation` does; the backend reads the current folder."""
    program = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", program, str(out)]
    ran = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=True)
    return out / ran.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the unpacked sdist, so that the sdist is complete."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", unpacked / f"murmuration-{VERSION}", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package alone."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-P", "-m", "pip", "install", *options, str(wheel)], check=True, timeout=120)
    return target


def files_of_the_packages() -> set[str]:
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    return {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"murmuration-{VERSION}.dist-info/")}
        licences = {name.partition("licenses/")[2] for name in archive.namelist() if "/licenses/" in name}
        metadata = message_from_bytes(archive.read(f"murmuration-{VERSION}.dist-info/METADATA"))
    configs = {f"node/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert names == files_of_the_packages() | configs
    assert {name.split("/")[0] for name in names} == set(PACKAGES), "no other top-level package"
    assert {"protocol/murmur_pb2.pyi", "node/dashboard/assets/index.html", "node/bootstrap.toml"} < names
    assert licences == {"LICENSE", "node/dashboard/assets/static/uPlot.LICENSE"}
    assert metadata["Version"] == VERSION and metadata["License-Expression"] == "Apache-2.0"
    assert {"data", "eval", "hf", "tensorboard", "test", "wandb"} == set(metadata.get_all("Provides-Extra", ()))


def test_sdist_holds_what_a_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    around = {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
    configs = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert names == files_of_the_packages() | configs | around


def murmur(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(installed, folder, "-m", "node.cli", *words)


def python(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed package in an empty folder, with nothing of the repository on the path."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
    environment = keep | {"PYTHONPATH": str(installed), "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    assert (installed / "bin" / "murmur").exists()
    program = "import node, protocol, optim; print(node.__file__, protocol.__file__, optim.__file__)"
    found = python(installed, tmp_path, "-c", program).stdout.split()
    assert len(found) == 3 and all(path.startswith(str(installed)) for path in found)
    assert murmur(installed, tmp_path, "--version").stdout == f"murmur {VERSION}\n"


def test_installed_package_finds_the_demo(installed: Path, tmp_path: Path) -> None:
    """`murmur recipes` computes bits for the demo's model, whose manifest is in the wheel."""
    shown = murmur(installed, tmp_path, "recipes")
    assert (shown.returncode, shown.stderr) == (0, "") and "frugal" in shown.stdout
    (installed / "node" / "configs").rename(installed / "away")
    try:
        without = python(installed, tmp_path, "-c", "from node.paths import demo_manifest; demo_manifest()")
        assert "MissingFileError" in without.stderr, "the control: without it the demo is not found"
    finally:
        (installed / "away").rename(installed / "node" / "configs")


def test_installed_package_trains_and_exports(installed: Path, tmp_path: Path) -> None:
    run = installed / "node" / "configs" / "test.toml"
    trained = murmur(installed, tmp_path, "up", str(run), "--peers", "2", "--rounds", "2", "--dir", "run", "--json")
    assert trained.returncode == 0, trained.stderr
    report = json.loads(trained.stdout)
    assert report["rounds"] >= 2 and report["agreed"]
    assert (tmp_path / "run" / "export" / "config.json").exists()

"""The wheel and the sdist hold what they must, and the wheel trains in a new environment, without the repository."""

import json
import os
import re
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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION, DEPENDENCIES = PROJECT["version"], PROJECT["dependencies"]
PACKAGES = ("murmuration", "node", "protocol", "optim")


FORGE = ("GITHUB_REPOSITORY", "GITHUB_REF_NAME", "GITHUB_SERVER_URL")


def build(kind: str, source: Path, out: Path, **forge: str) -> Path:
    """Build as `python -m build --no-isolation` does; the backend reads the current folder."""
    environment = {name: value for name, value in os.environ.items() if name not in FORGE} | forge
    program = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", program, str(out)]
    ran = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=120, check=True)
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
    """The site-packages of a new virtual environment that has the wheel.

    Its dependencies are those of this environment, by a path at the end: nothing is downloaded, and the repository,
    which is installed here in place, is not on it.
    """
    environment = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-P", "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(environment / "bin" / "python"), "install", *options]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    ours = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in ours))
    return packages


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
    extras = {"data", "docs", "eval", "hf", "hub", "tensorboard", "test", "wandb"}
    assert extras == set(metadata.get_all("Provides-Extra", ()))
    required = {line for line in metadata.get_all("Requires-Dist", ()) if "extra ==" not in line}
    assert {line.replace(" ", "").lower() for line in required} == {sorted_bounds(line) for line in DEPENDENCIES}


def sorted_bounds(requirement: str) -> str:
    """Return a requirement as metadata has it: the bounds in their order."""
    name, *bounds = re.split(r"(?=[<>=~!])", requirement.replace(",", ""), maxsplit=1)
    parts = re.findall(r"[<>=~!]+[^<>=~!]+", "".join(bounds))
    return name + ",".join(sorted(parts))


LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_index_page_has_addresses_where_the_forge_names_them(sdist: Path, tmp_path: Path) -> None:
    """A link of README.md that leads to a page of the repository would lead nowhere on the index."""
    forge = {"GITHUB_REPOSITORY": "flock/murmuration", "GITHUB_REF_NAME": "v9.9.9"}
    built = build("wheel", ROOT, tmp_path, **forge)
    with zipfile.ZipFile(built) as archive:
        metadata = message_from_bytes(archive.read(f"murmuration-{VERSION}.dist-info/METADATA"))
    home = "https://github.com/flock/murmuration"
    addresses = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", ()))
    assert set(addresses) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(home) for address in addresses.values())
    description = str(metadata.get_payload())
    links = LINK.findall(description)
    assert len(links) > 20 and not [link for link in links if not link.startswith(("https://", "#"))]
    assert f"{home}/raw/v9.9.9/docs/images/page.png" in links and f"{home}/blob/v9.9.9/LICENSE" in links
    with tarfile.open(sdist) as archive:
        own = archive.extractfile(f"murmuration-{VERSION}/PKG-INFO")
        assert own is not None and b"\nProject-URL: " not in own.read(), "the control: no address is invented"


def test_sdist_holds_what_a_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    around = {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "hatch_build.py"}
    around |= {"PKG-INFO", ".gitignore"}
    configs = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert names == files_of_the_packages() | configs | around


def murmur(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_installed(installed, folder, "murmur", *words)


def python(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_installed(installed, folder, "python", "-P", *words)


def run_installed(installed: Path, folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the new environment in an empty folder, with nothing of the repository on the path."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
    environment = keep | {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [str(installed.parents[2] / "bin" / program), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    assert (installed.parents[2] / "bin" / "murmur").exists()
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


@pytest.mark.nightly
def test_demo_of_the_installed_package_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """What a newcomer types after `pip install`: manifest and text are in the package and in Python itself."""
    trained = murmur(installed, tmp_path, "up", "--rounds", "6")
    assert trained.returncode == 0, trained.stderr
    assert "peers agree" in trained.stdout and re.search(r"validation loss +\d\.\d+ -> \d\.\d+", trained.stdout)
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "state", ".cache", ".local"}

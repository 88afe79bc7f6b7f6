"""What builds the image and runs it: a Docker engine, or buildah where there is none.

Both are driven through their command lines. Buildah runs in a chroot, which needs no cgroups and no daemon: processes
and the network are those of this machine, files and the user are the image's. Its base image is made by debootstrap,
from the mirror that apt uses here, so that no registry is needed either.
"""

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
TAG = "localhost/murmuration:check"
USER = 10001
BASE = "localhost/murmuration-base"
MOUNTED_PACKAGES = "/packages"  # as docker/Dockerfile has it
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
SUITE = "bookworm"
COMMAND_SECONDS = 600


@dataclass(frozen=True)
class Build:
    """What is handed to a build: arguments, and pip's settings of this machine as a secret file."""

    arguments: dict[str, str]
    pip: Path

    def options(self) -> list[str]:
        words = [word for name, value in self.arguments.items() for word in ("--build-arg", f"{name}={value}")]
        return [*words, "--secret", f"id=pip,src={self.pip}", "-f", str(ROOT / "docker" / "Dockerfile"), "-t", TAG]


class Engine(Protocol):
    """Runs have /data from one volume that outlives them, and the manifests of configs/ in /configs."""

    def build(self, build: Build) -> None: ...

    def inspect_image(self) -> dict[str, Any]:
        """Of the image: User, Entrypoint, Healthcheck, Volumes, ..."""

    def run(self, entrypoint: Sequence[str], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Until it ends by itself."""

    def start(self, words: Sequence[str]) -> None:
        """In the background, by the image's entrypoint. One at a time."""

    def run_in_container(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """One more command in what was started."""

    def stop(self, seconds: int) -> tuple[int, str]:
        """Say SIGTERM; the exit code, and all that was printed. A negative code: it had to be killed."""

    def close(self) -> None:
        """Leave no container and no volume behind."""


class Docker:
    """`command` answers to Docker's command line; `packages` is mounted for an image without any."""

    def __init__(self, command: Sequence[str], packages: Path | None = None) -> None:
        self._command = tuple(command)
        self._packages = packages
        self._name = f"murmuration-check-{os.getpid()}"

    def build(self, build: Build) -> None:
        _run_shown([*self._command, "build", *build.options(), str(ROOT)])

    def inspect_image(self) -> dict[str, Any]:
        (image,) = json.loads(_run_checked([*self._command, "image", "inspect", TAG]).stdout)
        own = {"Healthcheck": image["Healthcheck"]} if "Healthcheck" in image else {}  # where podman keeps it
        return {**image["Config"], **own}

    def run(self, entrypoint: Sequence[str], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        own = ["--entrypoint", entrypoint[0]] if entrypoint else []
        return _run([*self._command, "run", "--rm", *own, *self._mounts(), TAG, *entrypoint[1:], *words])

    def start(self, words: Sequence[str]) -> None:
        _run_checked([*self._command, "run", "--detach", "--name", self._name, *self._mounts(), TAG, *words])

    def run_in_container(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _run([*self._command, "exec", self._name, *command])

    def stop(self, seconds: int) -> tuple[int, str]:
        _run_checked([*self._command, "stop", "--time", str(seconds), self._name])
        code = int(_run_checked([*self._command, "inspect", "--format", "{{.State.ExitCode}}", self._name]).stdout)
        logs = _run_checked([*self._command, "logs", self._name])
        _run_checked([*self._command, "rm", self._name])
        return (-9 if code == 128 + signal.SIGKILL else code), logs.stdout + logs.stderr

    def close(self) -> None:
        _run([*self._command, "rm", "--force", self._name])
        _run([*self._command, "volume", "rm", "--force", self._name])

    def _mounts(self) -> list[str]:
        safe = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        volumes = [f"{self._name}:/data", f"{ROOT / 'configs'}:/configs:ro", *mounted(self._packages)]
        return [*safe, *(word for volume in volumes for word in ("--volume", volume))]


class Buildah:
    """Keeps its images below `storage`, so that a second check builds only what changed."""

    def __init__(self, storage: Path, packages: Path | None = None) -> None:
        self._packages = packages
        self._storage_options = ["--root", str(storage / "images"), "--runroot", str(storage / "state")]
        driver = (
            "overlay"
            if _succeeds(["buildah", *self._storage_options, "--storage-driver", "overlay", "info"])
            else "vfs"
        )
        self._command = ["buildah", *self._storage_options, "--storage-driver", driver]
        self._layers = "--layers" if driver == "overlay" else "--layers=false"  # vfs copies all of them for each step
        self._data = storage / f"data-{os.getpid()}"
        self._container = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._mount = storage / "images" / driver  # the driver mounts its folder upon itself
        self._log = storage / f"log-{os.getpid()}"

    def build(self, build: Build) -> None:
        if not _succeeds([*self._command, "inspect", "--type", "image", BASE]):
            self._make_base()
        mounts = [word for path in find_local_paths(build.pip) for word in ("--volume", f"{path}:{path}:ro")]
        options = ["--isolation", "chroot", "--format", "docker", self._layers, "--build-arg", f"BASE={BASE}"]
        _run_shown([*self._command, "build", *options, *mounts, *build.options(), str(ROOT)])

    def inspect_image(self) -> dict[str, Any]:
        shown = _run_checked([*self._command, "inspect", "--type", "image", TAG])
        return dict(json.loads(shown.stdout)["Docker"]["config"])

    def run(self, entrypoint: Sequence[str], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _run([*self._run_command(), *(entrypoint or self._entrypoint()), *words])

    def start(self, words: Sequence[str]) -> None:
        command = [*self._run_command(), *self._entrypoint(), *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run_in_container(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _run([*self._run_command(), *command])

    def stop(self, seconds: int) -> tuple[int, str]:
        assert self._process is not None
        first = find_first_process(self._process.pid, self._entrypoint()[0])
        if first is not None:
            os.kill(first, signal.SIGTERM)
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(first or self._process.pid, signal.SIGKILL)
            self._process.wait()
            code = -signal.SIGKILL
        return code, self._log.read_text(errors="replace")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop(10)
        if self._container:
            _run([*self._command, "rm", self._container])
        shutil.rmtree(self._data, ignore_errors=True)
        self._log.unlink(missing_ok=True)
        if self._mount.is_mount():
            _run_checked(["umount", str(self._mount)])

    def _make_base(self) -> None:
        with tempfile.TemporaryDirectory(prefix="murmuration-base-") as folder:
            options = ["--variant=minbase", f"--include={BASE_PACKAGES}"]
            _run_shown(["debootstrap", *options, SUITE, f"{folder}/root", *find_apt_mirror()])
            _run_shown(["tar", "-C", f"{folder}/root", "-cf", f"{folder}/root.tar", "."])
            container = _run_checked([*self._command, "from", "scratch"]).stdout.strip()
            _run_shown([*self._command, "add", "--quiet", container, f"{folder}/root.tar", "/"])
        _run_shown([*self._command, "commit", "--quiet", "--rm", container, BASE])

    def _entrypoint(self) -> list[str]:
        return list(self.inspect_image()["Entrypoint"])

    def _run_command(self) -> list[str]:
        if not self._container:
            self._container = _run_checked([*self._command, "from", TAG]).stdout.strip()
            self._data.mkdir(parents=True)
            os.chown(self._data, USER, USER)
        volumes = [f"{self._data}:/data", f"{ROOT / 'configs'}:/configs:ro", *mounted(self._packages)]
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        return [*self._command, "run", "--isolation", "chroot", *mounts, self._container, "--"]


def mounted(packages: Path | None) -> list[str]:
    """Return the volume of a folder of packages, where an image that was built without any looks for them."""
    return [] if packages is None else [f"{packages}:{MOUNTED_PACKAGES}:ro"]


def to_pip_conf(listed: str) -> str:
    """What `pip config list` prints, as a pip.conf; the environment's settings win over the files'."""
    values: dict[tuple[str, str], str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        values["global" if section == ":env:" else section, name] = str(ast.literal_eval(value))
    sections = dict.fromkeys(section for section, _ in values)
    lines = []
    for wanted in sections:
        lines += [
            f"[{wanted}]",
            *(f"{name} = {value}" for (section, name), value in values.items() if section == wanted),
        ]
    return "".join(f"{line}\n" for line in lines)


def find_local_paths(pip: Path) -> list[Path]:
    """Files and folders of this machine that pip's settings name; a build must see them under the same names."""
    words = [word.removeprefix("file://") for line in pip.read_text().splitlines() for word in line.split()]
    found = {Path(word) for word in words if word.startswith("/") and Path(word).exists()}
    # An index in a folder `simple` leads to the files beside it.
    return sorted({path.parent if path.name == "simple" else path for path in found})


def find_apt_mirror() -> list[str]:
    """Where apt finds Debian here, if it does at all."""
    wanted = [f"Codename: {SUITE}", "Component: main", "Identifier: Packages"]
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted]).stdout.split()
    return listed[:1]


def find_first_process(pid: int, name: str) -> int | None:
    """The descendant of `pid` that runs the program `name`: what a container's first process would be."""
    waiting = [pid]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (place / "comm").read_text().strip() == name:
                return int(place.name)
            for thread in (place / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return None


def _succeeds(command: Sequence[str]) -> bool:
    return _run(command).returncode == 0


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS)


def _run_checked(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = _run(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done


def _run_shown(command: Sequence[str]) -> None:
    """With its output shown."""
    if code := subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")

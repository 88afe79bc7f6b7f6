"""Build the image for real and use it as a volunteer does: `make image-check`.

It must train as a user without rights, say when it is healthy and when not, leave politely when the engine asks,
be the same peer after that, and hold nothing of the machine that built it. Needs a Docker engine (or DOCKER="podman"),
else buildah and debootstrap, and root.

`--quick` builds the image without torch and the other packages, and uses those of this machine from a folder: a few
minutes less and no download of packages, for the same steps but the size.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.docker.engines import USER, Build, Buildah, Docker, Engine, to_pip_conf

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
HEALTHY_SECONDS = 90.0
STOP_SECONDS = 60  # a trainer that starts just now ends before it is asked to write what it has
NODE = ("join", "/configs/test.toml", "--device", "cpu")
SIZES = """
du -sxm / 2>/dev/null | cut -f 1
cd /opt/murmur/lib/python3*/site-packages
du -scm torch* functorch nvidia* triton* cuda* 2>/dev/null | tail -n 1 | cut -f 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, help="buildah's images are kept here; default: thrown away at the end")
    parser.add_argument("--torch-index", default=CPU_TORCH, help="TORCH_INDEX of the build; empty: torch with CUDA")
    parser.add_argument("--extras", default="data,hub", help="EXTRAS of the build, such as data,hub,hf,eval")
    parser.add_argument("--quick", action="store_true", help="use this Python's packages, and install none")
    asked = parser.parse_args()
    packages = find_packages() if asked.quick else None
    with (
        tempfile.TemporaryDirectory(prefix="murmuration-") as temporary,
        contextlib.closing(choose_engine(asked.storage or Path(temporary), packages)) as engine,
    ):
        pip = Path(temporary) / "pip.conf"
        pip.write_text(read_pip_settings())
        with step("build"):
            arguments = {"PACKAGES": "mounted"} if packages else {"EXTRAS": asked.extras}
            if not packages:
                arguments["TORCH_INDEX"] = reachable_or_empty(asked.torch_index)
            engine.build(Build(arguments, pip))
        if packages is None:
            with step("size"):
                whole, torch = map(int, checked_output(engine.run(["sh", "-c", SIZES], [])).split())
                print(f"{whole:,} MB, {whole - torch:,} MB without torch")
        check(engine, pip.read_text())


def find_packages() -> Path:
    """Return the folder of torch, which has the other packages too."""
    return Path(checked_output(run([sys.executable, "-c", "import torch; print(torch.__file__)"]))).parents[1]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check(engine: Engine, settings: str) -> None:
    configuration = engine.inspect_image()
    health = configuration["Healthcheck"]["Test"][1:]
    with step("a user without rights"):
        expect(checked_output(engine.run(["id", "-u"], [])) == str(USER), "the user is another one")
        expect(engine.run(["touch", "/opt/murmur/mine"], []).returncode != 0, "the user may change the program")
    with step("nothing of the builder"):
        traces = str(configuration) + checked_output(
            engine.run(["sh", "-c", "pip config list; cat /etc/pip.conf 2>&1; true"], [])
        )
        found = [word for word in settings.split() if "/" in word and word in traces]
        expect(not found, f"the image tells of {found}")
    with step("murmur up"):
        checked_output(engine.run([], ["up", "/configs/test.toml", "--dir", "/data/up", "--device", "cpu", "--json"]))
    with step("unhealthy without a node"):
        expect(engine.run(health, []).returncode != 0, "it is healthy although no node runs")
    with step("join, healthy, SIGTERM"):
        first = run_one_life(engine, health)
    with step("the same peer again"):
        expect(run_one_life(engine, health) == first, "the second life is another peer")


def run_one_life(engine: Engine, health: Sequence[str]) -> str:
    """Of a node, until it is told to stop; its peer id."""
    engine.start(NODE)
    wait_until(lambda: engine.run_in_container(health).returncode == 0, HEALTHY_SECONDS)
    # `murmur key` refuses a folder without a key, so it must not run before the node has its folder.
    folder = 'set -- /data/murmur/test-*; test -e "$1/node.json" && echo "$1"'
    wait_until(lambda: engine.run_in_container(["sh", "-c", folder]).returncode == 0, HEALTHY_SECONDS)
    peer = checked_output(engine.run_in_container(["sh", "-c", "murmur key /data/murmur/test-*"]))
    code, said = engine.stop(STOP_SECONDS)
    expect(code == 0 and "Shutting down" in said, f"it did not leave politely ({code}):\n{said}")
    expect(names_peer(said, peer), f"{peer} is not who took part:\n{said}")
    return peer


def names_peer(log: str, peer: str) -> bool:
    """Return whether a node says that it is `peer`; log lines show the ends of an id."""
    return f"this node is {peer[:4]}..{peer[-6:]} in run" in log


def choose_engine(storage: Path, packages: Path | None = None) -> Engine:
    docker = shlex.split(os.environ.get("DOCKER", "docker"))
    if shutil.which(docker[0]) and subprocess.run([*docker, "info"], capture_output=True).returncode == 0:
        return Docker(docker, packages)
    if not shutil.which("buildah") or not shutil.which("debootstrap") or os.geteuid():
        raise SystemExit("no Docker engine answers; without one: apt-get install buildah debootstrap, and run as root")
    return Buildah(storage, packages)


def read_pip_settings() -> str:
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return to_pip_conf(listed.stdout)


def reachable_or_empty(index: str) -> str:
    """`index`, or nothing where its name means nothing here: pip would try it in vain for each package."""
    try:
        if index:
            socket.getaddrinfo(urlsplit(index).hostname, None)
    except OSError:
        print(f"{index} cannot be reached; torch comes from where pip is set up to find it", flush=True)
        return ""
    return index


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    print(f"-- {name}", flush=True)
    began = time.monotonic()
    yield
    print(f"   ok, {time.monotonic() - began:.0f} s", flush=True)


def checked_output(done: subprocess.CompletedProcess[str]) -> str:
    expect(done.returncode == 0, f"{done.args}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < deadline, f"not healthy after {seconds:.0f} s")
        time.sleep(1)


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(f"the image is not as it should be: {otherwise}")


if __name__ == "__main__":
    main()

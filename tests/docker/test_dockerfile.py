"""The Dockerfile, read as text: what a build of it can never become."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from typer.main import get_command

from node.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker" / "Dockerfile").read_text()
NAME = re.compile(r"^[A-Za-z0-9._-]+")


def stages(text: str) -> list[list[tuple[str, str]]]:
    """Instruction and arguments of each line, a list a stage; what stands before the first FROM is left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, arguments.strip()))
    return found


def last(instruction: str, text: str = TEXT) -> str:
    return next(arguments for name, arguments in reversed(stages(text)[-1]) if name == instruction)


def runs_as_root(text: str) -> bool:
    users = [arguments for name, arguments in stages(text)[-1] if name == "USER"]
    return not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


def test_the_user_has_no_rights_and_a_number() -> None:
    assert not runs_as_root(TEXT)
    assert runs_as_root(TEXT.replace("USER 10001:10001", "USER 0:0"))
    assert runs_as_root(TEXT.replace("USER 10001:10001\n", ""))


def test_signals_reach_murmur() -> None:
    assert json.loads(last("ENTRYPOINT"))[-1] == "murmur"  # a list: no shell in between
    assert last("STOPSIGNAL") == "SIGTERM"


def test_the_health_is_asked_by_a_command_that_exists() -> None:
    options, _, command = last("HEALTHCHECK").partition("CMD ")
    program, name, *words = json.loads(command)
    assert program == "murmur" and "--timeout=" in options
    get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


def test_state_lies_in_one_volume_and_no_port_is_opened() -> None:
    assert last("VOLUME") == "/data" == last("WORKDIR")
    assert "XDG_STATE_HOME=/data" in last("ENV")
    assert not [name for stage in stages(TEXT) for name, _ in stage if name in ("EXPOSE", "ADD")]


def test_everything_installed_is_pinned() -> None:
    installs = [words for stage in stages(TEXT) for name, words in stage if name == "RUN" and "pip install" in words]
    assert len(installs) == 3
    for words in installs:
        assert " -c " in words or ("--no-deps" in words and "--no-index" in words), words


def packages_of(extras: str) -> set[str]:
    listed = subprocess.check_output([sys.executable, "docker/image_packages.py", extras], cwd=ROOT, text=True)
    return {name[0] for line in listed.split("\n") if (name := NAME.match(line))}


def test_image_of_most_runs_has_no_package_of_data_sets_and_evaluation() -> None:
    small, full = packages_of("data,hub"), packages_of("data,hub,hf,eval")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {name[0] for line in project["dependencies"] if (name := NAME.match(line))} < small < full
    assert {"tokenizers", "huggingface-hub"} < small and {"datasets", "lm-eval"} == full - small - {"fsspec"}
    assert "ARG EXTRAS=data,hub\n" in TEXT, "what `make image` builds"


def test_nothing_is_thrown_away_that_a_node_imports() -> None:
    """A node runs without what docker/slim.sh removes; numpy's tests stay, because numpy imports a file of them."""
    script = (ROOT / "docker" / "slim.sh").read_text()
    (removed,) = re.findall(r"^for package in (.*); do # not numpy", script, re.MULTILINE)
    program = (
        "import sys, node.cli, node.daemon.lifecycle, node.trainer.loop, node.model.export, hivemind, scipy.optimize\n"
        "print(*(name for name, module in sys.modules.items() if '.tests' in name))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not [name for name in loaded if name.partition(".")[0] in removed.split()]


def test_torch_is_a_layer_of_its_own_that_only_its_own_pins_change() -> None:
    names = [(name, arguments) for name, arguments in stages(TEXT)[-1] if name in ("COPY", "RUN")]
    (first, copied), (second, installed), *_ = names
    assert (first, copied.split()[1:-1]) == ("COPY", ["/packages/torch.txt", "/packages/slim.sh"])
    assert second == "RUN" and re.search(r"pip install .*torch\.txt .* torch ", installed)
    assert all(arguments.startswith("--from=source") for name, arguments in names if name == "COPY")


def test_what_torch_brings_along_is_pinned_with_it() -> None:
    wanted = {
        "torch",
        *(found[0] for line in requires("torch") or () if "extra ==" not in line and (found := NAME.match(line))),
    }
    pattern = re.compile(re.search(r"grep -E '(\^.*==)'", TEXT)[1])  # type: ignore[index]
    kept = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if pattern.match(line)
    }
    assert {name.lower().replace("_", "-") for name in wanted} <= kept


@pytest.mark.parametrize(
    "place", ["docker/Dockerfile", "docker/compose.yaml", "tests/docker/engines.py", "tests/docker/image_check.py"]
)
def test_no_mirror_is_named(place: str) -> None:
    hosts = set(re.findall(r"https?://([^/\s\"'}\]:]+)", (ROOT / place).read_text()))
    assert hosts <= {"download.pytorch.org", "host", "127.0.0.1"}


def test_a_build_sees_only_what_the_wheel_is_made_of() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    assert {"!node", "!optim", "!protocol", "!configs", "!pyproject.toml", "!constraints.txt", "!LICENSE"} < set(rules)
    assert all((ROOT / rule[1:]).exists() for rule in rules if rule[0] == "!")


def test_the_image_names_its_version_after_every_package() -> None:
    """A label of its own changes no layer of packages."""
    names = [name for name, _ in stages(TEXT)[-1]]
    assert "org.opencontainers.image.version=$VERSION" in last("LABEL") and last("ARG") == "VERSION="
    assert names.index("LABEL") > max(index for index, name in enumerate(names) if name in ("COPY", "RUN"))


@pytest.mark.slow
def test_make_image_tags_the_version_and_latest() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    shown = subprocess.check_output(["make", "-n", "image"], cwd=ROOT, text=True)
    assert f"-t murmuration:{version} -t murmuration:latest" in shown and f"VERSION={version}" in shown

"""What is handed to a build and how a process in a container is found; the engines themselves: `make image-check`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node.monitoring.peer_lines import PeerNames
from tests.docker.engines import (
    MOUNTED_PACKAGES,
    ROOT,
    Build,
    Docker,
    find_first_process,
    find_local_paths,
    to_pip_conf,
)
from tests.docker.image_check import choose_engine, names_peer, reachable_or_empty

pytestmark = pytest.mark.slow

RECORDER = """
import pathlib, sys
with pathlib.Path(sys.argv[1]).open("a") as log:
    log.write(" ".join(sys.argv[2:]) + "\\n")
print({"inspect": "137", "image": '[{"Config": {"User": "1"}, "Healthcheck": {}}]'}.get(sys.argv[2], ""))
"""


def test_pip_settings_of_the_environment_win() -> None:
    listed = ":env:.find-links='/b'\nglobal.find-links='/a'\nglobal.timeout='60'\ninstall.no-deps='true'\n"
    assert to_pip_conf(listed) == "[global]\nfind-links = /b\ntimeout = 60\n[install]\nno-deps = true\n"
    assert to_pip_conf("") == ""


def test_what_lies_on_this_machine_is_shown_to_a_build(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    pip = tmp_path / "pip.conf"
    places = f"file://{tmp_path}/index/simple https://mirror.example/simple {tmp_path}/none"
    pip.write_text(f"[global]\nfind-links = {tmp_path}/wheels\nextra-index-url = {places}\n")
    assert find_local_paths(pip) == [tmp_path / "index", tmp_path / "wheels"]


def test_a_mirror_goes_as_a_secret_and_never_as_an_argument(tmp_path: Path) -> None:
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nindex-url = https://mirror.example/simple\n")
    options = Build({"TORCH_INDEX": ""}, pip).options()
    assert f"id=pip,src={pip}" in options and "TORCH_INDEX=" in options
    assert "mirror.example" not in " ".join(options)


def test_an_index_that_means_nothing_here_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert reachable_or_empty("https://nowhere.invalid/whl") == ""
    assert "nowhere.invalid" in capsys.readouterr().out
    assert reachable_or_empty("http://127.0.0.1/whl") == "http://127.0.0.1/whl"
    assert reachable_or_empty("") == ""


def test_the_log_of_a_node_names_it_by_the_ends_of_its_id() -> None:
    """As the product's own formatter writes it, so that a new form of ids is noticed here and not in an image."""
    peer, other = (
        "12D3KooWBhMbLvQHgbbMGjLhcHkmz4w7LvfMSqBKcGDNprxbdPKh",
        "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
    )
    said = PeerNames().replace_ids(f"10:00:00 this node is {peer} in run test")
    assert names_peer(said, peer) and not names_peer(said, other)


def test_packages_of_this_machine_are_mounted_where_the_image_looks_for_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    Docker([sys.executable, "-c", RECORDER, str(log)], tmp_path / "packages").run([], ["--version"])
    Docker([sys.executable, "-c", RECORDER, str(log)]).run([], ["--version"])
    mounted, plain = log.read_text().splitlines()
    assert f"{tmp_path}/packages:{MOUNTED_PACKAGES}:ro" in mounted and MOUNTED_PACKAGES not in plain
    assert f"echo {MOUNTED_PACKAGES} >" in (ROOT / "docker" / "Dockerfile").read_text()


def test_without_an_engine_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install buildah debootstrap"):
        choose_engine(tmp_path)


def test_docker_runs_without_rights_and_tells_a_kill_from_a_departure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    docker = Docker([sys.executable, "-c", RECORDER, str(log)])
    assert docker.inspect_image() == {"User": "1", "Healthcheck": {}}
    docker.start(["join", "URL"])
    assert docker.stop(7)[0] == -9
    started, stopped = (line for line in log.read_text().splitlines() if line.startswith(("run", "stop")))
    assert "--read-only" in started and "--cap-drop ALL" in started and "privileged" not in started
    assert started.endswith("join URL") and stopped.startswith("stop --time 7")


def test_the_first_process_inside_is_found_below_others() -> None:
    script = "sleep 60 & wait"
    with subprocess.Popen(["bash", "-c", f"bash -c '{script}'; true"], start_new_session=True) as outer:
        try:
            deadline = time.monotonic() + 20
            found = None
            while found is None and time.monotonic() < deadline:
                found = find_first_process(outer.pid, "sleep")
            assert found is not None and found != outer.pid
            assert find_first_process(outer.pid, "tini") is None
        finally:
            os.killpg(outer.pid, signal.SIGKILL)

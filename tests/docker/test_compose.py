"""The compose file and what it mounts, read as data."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from node.cli import app

FOLDER = Path(__file__).parents[2] / "docker"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


COMPOSE: dict[str, Any] = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def rights(service: dict[str, Any]) -> list[str]:
    """What a service is allowed that it should not be."""
    faults: list[str] = [
        key for key in ("privileged", "devices", "cap_add", "network_mode", "pid", "ipc", "user") if key in service
    ]
    faults += ["capabilities"] * (service.get("cap_drop") != ["ALL"])
    faults += ["new privileges"] * ("no-new-privileges:true" not in service.get("security_opt", ()))
    faults += [port for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")]
    return faults + [mount for mount in service["volumes"] if "docker.sock" in mount]


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_more_rights_than_it_needs(name: str) -> None:
    assert rights(SERVICES[name]) == []


@pytest.mark.parametrize(
    "change", [{"privileged": True}, {"ports": ["8080:8080"]}, {"cap_drop": []}, {"volumes": ["/run/docker.sock:/s"]}]
)
def test_a_service_with_more_rights_is_noticed(change: dict[str, Any]) -> None:
    assert rights(copy.deepcopy(SERVICES["host"]) | change)


def test_a_host_and_at_least_three_peers_that_wait_for_it() -> None:
    assert set(OURS) == {"host", "peer"}
    assert OURS["peer"]["deploy"]["replicas"] >= 3
    assert OURS["peer"]["depends_on"]["host"]["condition"] == "service_healthy"
    assert OURS["host"]["healthcheck"]["test"][0] == "CMD"
    assert all(service["read_only"] and service["tmpfs"] == ["/tmp"] for service in OURS.values())


@pytest.mark.parametrize("name", OURS)
def test_commands_are_understood(name: str) -> None:
    command, *words = OURS[name]["command"]
    get_command(app).commands[command].make_context(command, words)  # type: ignore[attr-defined]


def test_the_image_is_built_from_here_with_an_argument_that_it_knows() -> None:
    build = OURS["peer"]["build"]
    text = (FOLDER / build["context"] / build["dockerfile"]).read_text()
    assert all(f"ARG {name}=" in text for name in build["args"])


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name: str) -> None:
    for mount in SERVICES[name]["volumes"]:
        source = mount.rpartition("}:")[0].partition(":-")[2] or mount.partition(":")[0]
        if source.startswith("."):
            assert (FOLDER / source).is_file() and mount.endswith(":ro")
        else:
            assert source == "/data" or source in COMPOSE["volumes"]


def test_prometheus_asks_where_the_services_answer() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yaml")["scrape_configs"]}
    host, peers = OURS["host"]["command"], OURS["peer"]["command"]
    (target,) = jobs["host"]["static_configs"][0]["targets"]
    assert target == "host:" + host[host.index("--http") + 1].rpartition(":")[2]
    (found,) = jobs["peers"]["dns_sd_configs"]
    assert found["names"] == ["peer"]
    assert str(found["port"]) == peers[peers.index("--metrics") + 1].rpartition(":")[2]


def test_grafana_finds_prometheus_and_the_board() -> None:
    (source,) = read("grafana/datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["uid"] == "prometheus"
    folder = read("grafana/boards.yaml")["providers"][0]["options"]["path"]
    assert f"./grafana/board.json:{folder}/board.json:ro" in SERVICES["grafana"]["volumes"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/board.json"

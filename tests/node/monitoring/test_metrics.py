import asyncio
import re
import signal
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.monitoring.metrics import Metrics, serve_metrics
from node.monitoring.status import DeviceUse, NodeStatus, fetch_status
from protocol.errors import UsageError
from tests.node.monitoring.fixed_status import FixedStatus

LOOPBACK = "127.0.0.1:0"
STATUS = NodeStatus(
    peer_id="12D3KooWTest",
    run="demo",
    run_id="ab" * 32,
    phase="training",
    tokens=5000,
    loss=2.5,
    peers=3,
    bytes_sent=100,
    bytes_sent_by_kind={"blobs": 70},
    bytes_received=50,
    bytes_received_by_kind={"blobs": 20, "gossip": 30},
    seconds={"compute": 8.0, "wait": 2.0},
)


async def get(port: int, path: str, host: str = "127.0.0.1", accept: str = "*/*") -> tuple[int, str, str]:
    """Return status code, lower-case head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), head.lower(), body


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class FourBlobs:
    size = 4096

    def __len__(self) -> int:
        return 4


async def test_scrape_returns_counters_and_current_status() -> None:
    metrics, current = Metrics(), FixedStatus(STATUS)
    metrics.record_round("included")
    metrics.record_early_submit()
    metrics.record_round("included")
    metrics.record_round("missed")
    metrics.record_refusal("forged")
    metrics.record_skipped_rows({"null": 2, "too long": 1})
    metrics.add_store(FourBlobs())
    async with serve_metrics(LOOPBACK, metrics, current) as port:
        code, head, body = await get(port, "/metrics")
        values = samples(body)
        current.current = STATUS.model_copy(update={"tokens": 9000})
        later = samples((await get(port, "/metrics"))[2])
    assert code == 200
    assert "text/plain" in head
    assert values["murmur_rounds_total", ("included",)] == 2
    assert values["murmur_rounds_total", ("missed",)] == 1
    assert values["murmur_refusals_total", ("forged",)] == 1
    assert values["murmur_hurries_total", ()] == 1
    assert values["murmur_data_skipped_total", ("null",)] == 2
    assert values["murmur_blobs", ()] == 4
    assert values["murmur_blob_bytes", ()] == 4096
    assert values["murmur_tokens_total", ()] == 5000
    assert values["murmur_loss", ()] == 2.5
    assert values["murmur_peers_known", ()] == 3
    assert values["murmur_seconds_total", ("compute",)] == 8
    assert values["murmur_bytes_total", ("sent", "blobs")] == 70
    assert values["murmur_bytes_total", ("sent", "other")] == 30
    assert values["murmur_bytes_total", ("received", "other")] == 0
    assert ("murmur_validation_loss", ()) not in values  # unknown is absent, not zero
    assert later["murmur_tokens_total", ()] == 9000


async def test_metric_names_have_our_prefix_and_nodes_do_not_share_counters() -> None:
    first, second = Metrics(), Metrics()
    first.record_refusal("stale")
    async with serve_metrics(LOOPBACK, second, FixedStatus(STATUS)) as port:
        values = samples((await get(port, "/metrics"))[2])
    assert all(name.startswith("murmur_") for name, _ in values)
    assert ("murmur_refusals_total", ("stale",)) not in values


async def test_openmetrics_format_on_request() -> None:
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        _, head, body = await get(port, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert "application/openmetrics-text" in head
    assert body.endswith("# EOF\n")


async def test_health_and_status_endpoints() -> None:
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        assert (await get(port, "/healthz"))[::2] == (200, "ok training\n")
        assert await fetch_status(port, 5.0) == STATUS
        assert (await get(port, "/elsewhere"))[0] == 404


async def test_loopback_server_rejects_other_host_names() -> None:
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        assert listening_addresses(port) == {"0100007F"}
        assert (await get(port, "/status", host="evil.example"))[0] == 400


async def test_server_on_all_interfaces_accepts_any_host_name() -> None:
    async with serve_metrics("0.0.0.0:0", Metrics(), FixedStatus(STATUS)) as port:
        everywhere = "0" * 32 if socket.has_dualstack_ipv6() else "0" * 8  # one socket serves IPv4 and IPv6
        assert listening_addresses(port) == {everywhere}
        assert (await get(port, "/metrics", host="peer-1:9464"))[0] == 200
        assert await fetch_status(port, 5.0) == STATUS


async def test_server_leaves_signal_handlers_alone_and_releases_its_port() -> None:
    before, handler = asyncio.all_tasks(), signal.getsignal(signal.SIGINT)
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        await get(port, "/healthz")
        assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert asyncio.all_tasks() == before


async def test_server_stops_in_time_with_an_open_client_connection() -> None:
    async with asyncio.timeout(8), serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status HTTP/1.1\r\nHost: 127")  # and never the rest
        await writer.drain()
    writer.close()


async def test_taken_port_raises_usage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--metrics"):
            async with serve_metrics(f"127.0.0.1:{port}", Metrics(), FixedStatus(STATUS)):
                pass


def listening_addresses(port: int) -> set[str]:
    """Return the local addresses with a listening socket on `port`, in the kernel's hexadecimal form."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.split(":")[1], 16) == port:
                found.add(address.split(":")[0])
    return found


async def test_documented_figures_of_training_exist_in_status_and_metrics() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "status.md").read_text()
    table = page.split("## Figures of training")[1].split("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", table, re.MULTILINE))
    assert len(rows) == 8 and rows.keys() <= NodeStatus.model_fields.keys()
    status = STATUS.model_copy(update=dict.fromkeys(rows, 0.5))
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(status)) as port:
        values = samples((await get(port, "/metrics"))[2])
    assert {name: values[name, ()] for name in rows.values()} == dict.fromkeys(rows.values(), 0.5)


async def test_each_of_several_cards_has_its_own_figures() -> None:
    cards = (DeviceUse(share=0.5, memory=1, memory_total=4), DeviceUse(memory=2, memory_total=4))
    async with serve_metrics(LOOPBACK, Metrics(), FixedStatus(STATUS.model_copy(update={"cards": cards}))) as port:
        values = samples((await get(port, "/metrics"))[2])
    found = {key: value for key, value in values.items() if key[0].startswith("murmur_card")}
    assert found == {
        ("murmur_card_use", ("0",)): 0.5,
        ("murmur_card_memory_bytes", ("0",)): 1,
        ("murmur_card_memory_bytes", ("1",)): 2,
        ("murmur_card_memory_total_bytes", ("0",)): 4,
        ("murmur_card_memory_total_bytes", ("1",)): 4,
    }

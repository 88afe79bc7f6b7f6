import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest

from node.data.skipped_rows import SkipReason
from node.monitoring.status import NodeStatus, RecoveredErrorKind, fetch_status
from node.monitoring.status_reporter import REJECT_TEXTS
from optim.aggregation.base import LeftOut
from protocol.admission import Refusal
from protocol.audit_tracker import Offence
from protocol.audits import VERDICTS
from protocol.blobs.server import _STATUS
from protocol.consensus.events import RejectReason
from protocol.errors import PeerFault, UnreachableError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WORKING = NodeStatus(
    peer_id="12D3KooWTest",
    run="demo",
    run_id="ab" * 32,
    phase="training",
    round=12,
    target_rounds=60,
    step=138,
    tokens_per_second=9100,
    bytes_sent=4_200_000,
    contributions_included=11,
    contributions_excluded=1,
    last_included_round=11,
)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_summary_of_a_contributing_node() -> None:
    expected = "round 12/60 · step 138 · 9.1k tok/s · sent 4.2 MB · included 11/12 · contributing: yes"
    assert WORKING.summary() == expected


def test_summary_of_a_host_that_only_watches() -> None:
    watching = WORKING.model_copy(update={"phase": "watching", "peers": 1, "page": "http://127.0.0.1:8080/"})
    expected = "round 12/60 · 1 peer · sent 4.2 MB · watching · page http://127.0.0.1:8080/"
    assert watching.summary() == expected
    assert watching.describe_contributing() == "no: this host only watches; use `murmur host --train` to take part"


def test_summary_counts_the_direct_paths() -> None:
    paths = {"a": "direct, 4 connections", "b": "libp2p", "c": "direct, 1 connection"}
    assert " · direct to 2 of 3 · contributing: yes" in WORKING.model_copy(update={"paths": paths}).summary()


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "yes"),
        ({"last_included_round": 10}, "yes"),  # one missed round may be in flight
        ({"last_included_round": 9}, "no, not in the last 2 rounds: the reason is not known here"),
        ({"last_included_round": 9, "absence": "late"}, "no, not in the last 2 rounds: late"),
        ({"last_included_round": None}, "no: its first contribution is not ready yet"),
        ({"last_included_round": None, "absence": "too slow"}, "no: too slow"),
        ({"phase": "catching up", "reason": "replaying 3 rounds"}, "no: catching up, replaying 3 rounds"),
        ({"trainer_trouble": "the trainer died (signal 9)"}, "no: the trainer died (signal 9)"),
        ({"alone": True}, "no: no other training peer can be reached; check whether this machine is online"),
        ({"phase": "waiting for peers", "reason": "1 of 3 peers"}, "no: 1 of 3 peers"),
        ({"phase": "rolling out"}, "no: no trainer has taken its groups yet"),
        ({"phase": "rolling out", "reason": "the round has enough", "rollouts": {"groups taken": 3}}, "yes"),
        ({"phase": "rolling out", "absence": "a margin of 3"}, "no: a margin of 3"),
        ({"paused": "others use 60% of the processors"}, "no: paused, others use 60% of the processors"),
        ({"phase": "joining"}, "no: joining"),
        ({"phase": "done"}, "no: the run has reached its target"),
    ],
)
def test_contributing_text_gives_the_reason(changes: dict[str, object], answer: str) -> None:
    assert WORKING.model_copy(update=changes).describe_contributing() == answer


def test_summary_reports_an_unsaved_checkpoint() -> None:
    unsaved = WORKING.model_copy(update={"unsaved": "the disk is full"})
    assert unsaved.summary().endswith("contributing: yes · not saved: the disk is full")


def test_round_text_without_a_target() -> None:
    assert WORKING.model_copy(update={"target_rounds": None}).describe_round() == "round 12"


def test_json_round_trip_keeps_all_fields_and_turns_nan_into_none() -> None:
    status = WORKING.model_copy(update={"loss": math.nan, "seconds": {"compute": 1.5}})
    restored = NodeStatus.model_validate_json(status.model_dump_json())
    assert restored == status.model_copy(update={"loss": None})


async def serve(handler: Handler) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_fetch_without_a_node_suggests_to_start_one(unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError, match=f"no node answers on 127.0.0.1:{unused_tcp_port}; start it"):
        await fetch_status(unused_tcp_port, 1.0)


async def test_fetch_raises_unreachable_after_its_deadline() -> None:
    release = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server, port = await serve(silent)
    async with server:
        with pytest.raises(UnreachableError, match="no node answers"):
            await asyncio.wait_for(fetch_status(port, 0.1), 5)
        release.set()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n\r\nnonsense", b"HTTP/1.1 404 Not Found\r\n\r\n{}", b"", b"x" * (3 << 20)]
)
async def test_fetch_from_another_program_raises_unreachable(answer: bytes) -> None:
    async def other_program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server, port = await serve(other_program)
    async with server:
        with pytest.raises(UnreachableError):
            await fetch_status(port, 5.0)


def test_reason_lines_list_the_most_frequent_reason_first() -> None:
    assert WORKING.reason_lines() == ()
    counted = WORKING.model_copy(
        update={
            "absences": {"late": 1, "slow": 3},
            "setbacks": {"not delivered": 2, "blob late": 2},
            "direct_refusals": {"forged": 1},
        }
    )
    assert counted.reason_lines() == (
        "missed rounds: slow 3, late 1",
        "recovered errors: blob late 2, not delivered 2",
        "direct connections refused: forged 1",
    )


def explained_reasons(heading: str) -> set[str]:
    """Return the reasons in one table of docs/reference/status.md."""
    text = (ROOT / "docs" / "reference" / "status.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {word for row in rows for word in row.split(", ")} - {"word"}


def find_reasons(pattern: str, *files: str) -> set[str]:
    """Return all matches of a pattern in these source files."""
    return {word for file in files for word in re.findall(pattern, (ROOT / file).read_text())}


def test_status_page_explains_exactly_the_reasons_that_the_code_reports() -> None:
    assert explained_reasons("Recovered errors") == set(get_args(RecoveredErrorKind))
    absences = set(REJECT_TEXTS) | find_reasons(r'MissReason\("([a-z ]+)"', "node/monitoring/status_reporter.py")
    assert {"slow", "excluded"} < absences and explained_reasons("Missed rounds") == absences
    assert explained_reasons("Skipped rows") == set(get_args(SkipReason))
    counted = {word for _, word in _STATUS.values()} | {kind("").metric_label for kind in PeerFault.__subclasses__()}
    counted_reasons = find_reasons(
        r'refusals\["([a-z ]+)"\]',
        "protocol/transport/connection_supervisor.py",
        "protocol/transport/grpc_bridge.py",
        "protocol/transport/dial_policy.py",
        "protocol/blobs/download.py",
    )
    assert {"stream lost", "wrong blob"} < counted_reasons
    words = {*get_args(RejectReason), *get_args(Offence), *get_args(LeftOut), *get_args(Refusal)}
    assert explained_reasons("Refused") == words | counted | counted_reasons
    assert explained_reasons("Audits") == {*VERDICTS, "skipped"}
    direct = find_reasons(r'(?:_refuse\(|return )"([A-Za-z ]+)"', "protocol/transport/tls/listener.py")
    assert "cut" in direct and explained_reasons("Direct connections refused") == direct

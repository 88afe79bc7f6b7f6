import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.monitoring.logs import OUR_PACKAGES, SILENCED_LOGGERS, configure_logs
from protocol.murmur_pb2 import PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from tests.protocol.garbled_server import garbled_channel

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The loggers are as before afterwards."""
    root = logging.getLogger()
    handlers, levels = (
        root.handlers[:],
        {name: logging.getLogger(name).level for name in ("", *OUR_PACKAGES, *SILENCED_LOGGERS)},
    )
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def speak() -> None:
    logging.getLogger("node.daemon.lifecycle").info("round %d", 3)
    logging.getLogger("protocol.transport.libp2p.p2pd").debug("too much")
    logging.getLogger("uvicorn.error").info("not asked for")
    logging.getLogger("uvicorn.error").warning("but this")


def test_lines_for_a_person(capsys: Capture) -> None:
    configure_logs(as_json=False)
    speak()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d round 3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: but this \[uvicorn.error\]", second)


FORGED = "peer refuses (x\n12:00:00 error: forged\x1b[2J)"


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_what_a_peer_says_forges_no_line(capsys: Capture, level: int) -> None:
    configure_logs(as_json=False)
    logging.getLogger("node").log(level, "%s", FORGED)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "\x1b" not in told
    assert "peer refuses (x\ufffd12:00:00 error: forged\ufffd[2J)" in told
    assert FORGED.count("\n") == 1 and "\x1b" in FORGED, "the control: it would"


def test_a_traceback_keeps_its_lines_and_no_more(capsys: Capture) -> None:
    configure_logs(as_json=False)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("node").exception("it broke")
    told = capsys.readouterr().err
    assert "it broke [node]\nTraceback (most recent call last):\n" in told
    assert "forged\ufffd[2J" in told and "\x1b" not in told


async def test_bytes_that_do_not_parse_leave_no_traceback(capsys: Capture, tmp_path: Path) -> None:
    async def told() -> str:
        async with garbled_channel(tmp_path / "s") as channel:
            await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
        return capsys.readouterr().err

    configure_logs(as_json=False)
    assert await told() == ""
    logging.getLogger("grpc._common").setLevel(logging.NOTSET)
    assert "Traceback" in await told(), "the control"


def test_one_object_a_line(capsys: Capture) -> None:
    configure_logs(as_json=True)
    speak()
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("node").exception("it broke")
    objects = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in objects] == ["round 3", "but this", "it broke"]
    assert objects[0]["level"] == "info"
    assert objects[0]["time"] > 1e9
    assert "ValueError: a\nb" in objects[2]["traceback"]


def test_configured_twice_speaks_once(capsys: Capture) -> None:
    configure_logs(as_json=False)
    configure_logs(as_json=False)
    speak()
    assert len(capsys.readouterr().err.splitlines()) == 2

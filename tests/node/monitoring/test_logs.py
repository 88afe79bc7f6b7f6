import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.monitoring.display import OUR_PACKAGES, SILENCED_LOGGERS, configure_logs
from protocol.identity import Identity
from protocol.murmur_pb2 import PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from tests.protocol.garbled_server import garbled_channel

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Restore the loggers after each test."""
    root = logging.getLogger()
    handlers, levels = (
        root.handlers[:],
        {name: logging.getLogger(name).level for name in ("", *OUR_PACKAGES, *SILENCED_LOGGERS)},
    )
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def log_sample_lines() -> None:
    logging.getLogger("node.daemon.lifecycle").info("round %d", 3)
    logging.getLogger("protocol.transport.p2pd").debug("too much")
    logging.getLogger("uvicorn.error").info("a library line below WARNING")
    logging.getLogger("uvicorn.error").warning("a library warning")


def test_plain_lines_have_time_message_and_warning_level(capsys: Capture) -> None:
    configure_logs(as_json=False)
    log_sample_lines()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d round 3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: a library warning", second)


def test_verbose_lines_name_modules_and_whole_ids_and_have_details(capsys: Capture) -> None:
    peer = Identity.create().peer_id
    for verbose in (False, True):
        configure_logs(verbose=verbose)
        log_sample_lines()
        logging.getLogger("node").info("%s joined", peer)
        output = capsys.readouterr().err
        assert ("[uvicorn.error]" in output) == ("too much" in output) == (peer in output) == verbose


FORGED = "peer refuses (x\n12:00:00 error: forged\x1b[2J)"


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_text_from_a_peer_cannot_forge_a_log_line(capsys: Capture, level: int) -> None:
    configure_logs(as_json=False)
    logging.getLogger("node").log(level, "%s", FORGED)
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "\x1b" not in output
    assert "peer refuses (x\ufffd12:00:00 error: forged\ufffd[2J)" in output
    assert FORGED.count("\n") == 1 and "\x1b" in FORGED, "control: the raw text would forge one"


def test_traceback_keeps_its_lines_but_quoted_text_adds_none(capsys: Capture) -> None:
    configure_logs(as_json=False)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("node").exception("it broke")
    output = capsys.readouterr().err
    assert "it broke\nTraceback (most recent call last):\n" in output
    assert "forged\ufffd[2J" in output and "\x1b" not in output


async def test_malformed_grpc_message_logs_no_traceback(capsys: Capture, tmp_path: Path) -> None:
    async def call_garbled_server() -> str:
        async with garbled_channel(tmp_path / "s") as channel:
            await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
        return capsys.readouterr().err

    configure_logs(as_json=False)
    assert await call_garbled_server() == ""
    logging.getLogger("grpc._common").setLevel(logging.NOTSET)
    assert "Traceback" in await call_garbled_server(), "control: grpc logs one by default"


def test_json_log_has_one_object_a_line(capsys: Capture) -> None:
    configure_logs(as_json=True)
    log_sample_lines()
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("node").exception("it broke")
    objects = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in objects] == ["round 3", "a library warning", "it broke"]
    assert objects[0]["level"] == "info"
    assert objects[0]["time"] > 1e9
    assert "ValueError: a\nb" in objects[2]["traceback"]


def test_configuring_logs_twice_logs_each_line_once(capsys: Capture) -> None:
    configure_logs(as_json=False)
    configure_logs(as_json=False)
    log_sample_lines()
    assert len(capsys.readouterr().err.splitlines()) == 2

import json
import logging
import re
from collections.abc import Iterator

import pytest

from node.logs import OURS, configure_logs

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The loggers are as before afterwards."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", *OURS)}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def speak() -> None:
    logging.getLogger("node.daemon.lifecycle").info("round %d", 3)
    logging.getLogger("protocol.network.p2pd").debug("too much")
    logging.getLogger("uvicorn.error").info("not asked for")
    logging.getLogger("uvicorn.error").warning("but this")


def test_lines_for_a_person(capsys: Capture) -> None:
    configure_logs(as_json=False)
    speak()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d round 3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: but this \[uvicorn.error\]", second)


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

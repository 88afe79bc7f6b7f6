from pathlib import Path

import pytest

from node.flags import NodeFlags
from node.options import NodeOptions, parse_options, threads_per_process
from protocol.errors import UsageError
from protocol.manifest import load_manifest

MANIFEST = load_manifest(Path(__file__).parents[2] / "configs" / "test.toml")
PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWTest"


def settings(**changes: object) -> NodeOptions:
    values = {"manifest": MANIFEST, "base": Path(), "folder": Path("here"), **changes}
    return parse_options(NodeOptions, NodeFlags(), **values)


def test_defaults() -> None:
    made = settings(peers=(PEER,))
    assert made.peers == (PEER,)
    assert made.device == "auto"
    assert made.metrics == "127.0.0.1:0"
    assert made.run_id == MANIFEST.run_id
    assert made.direct == 0
    assert settings(direct="4002").direct == 4002
    assert settings(direct="off").direct is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peers": ("203.0.113.7:4001",)}, "--peer: '203.0.113.7:4001' is no multiaddress"),
        ({"peers": ("/ip4/203.0.113.7/tcp/4001",)}, "--peer: .* append /p2p/"),
        ({"listen": ("0.0.0.0",)}, "--listen: '0.0.0.0' is no multiaddress"),
        ({"device": "tpu"}, "--device: "),
        ({"metrics": "0.0.0.0:70000"}, "--metrics: .* is no address"),
        ({"metrics": "192.0.2.1:80"}, "--metrics: .* everywhere"),
        ({"direct": "abc"}, "--direct: 'abc' is no port; write one from 0 to 65535, or off$"),
        ({"direct": "70000"}, "--direct: '70000' is no port; write one"),
        ({"direct": ""}, "--direct: '' is no port; write one"),
        ({"name": "a\x07b"}, r"--name: 'a\\x07b' has control characters, .*; leave them out"),
        ({"threads": 0}, "--threads: "),
        ({"upload": 0.0}, "--upload: "),
        ({"colour": 1}, "--colour: "),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_option(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        settings(**changes)
    assert "\n" not in str(caught.value)


def test_threads_are_shared_and_never_none() -> None:
    assert threads_per_process(1) >= 1
    assert threads_per_process(10_000) == 1

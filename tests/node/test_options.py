import os
from pathlib import Path

import pytest

from node.flags import NodeFlags
from node.options import NodeOptions, parse_options, threads_per_process
from protocol.errors import UsageError
from protocol.manifest.reading import load_manifest

MANIFEST = load_manifest(Path(__file__).parents[2] / "configs" / "test.toml")
PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"


def make_options(**changes: object) -> NodeOptions:
    values = {"manifest": MANIFEST, "base": Path(), "folder": Path("here"), **changes}
    return parse_options(NodeOptions, NodeFlags(), **values)


def test_defaults() -> None:
    options = make_options(peers=(PEER,))
    assert options.peers == (PEER,)
    assert options.device == "auto"
    assert options.metrics == "127.0.0.1:0"
    assert options.run_id == MANIFEST.run_id
    assert options.direct == 0
    assert make_options(direct="4002").direct == 4002
    assert make_options(direct="off").direct is None


@pytest.mark.parametrize(
    ("typed", "devices"),
    [
        ("0,1", ("cuda:0", "cuda:1")),
        ("cuda:3", ("cuda:3",)),
        (" 1, 0 ", ("cuda:1", "cuda:0")),
        ("cpu,cpu", ("cpu", "cpu")),
    ],
)
def test_list_of_devices(typed: str, devices: tuple[str, ...]) -> None:
    assert make_options(devices=typed).devices == devices == make_options(devices=devices).devices


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peers": ("203.0.113.7:4001",)}, "--peer: '203.0.113.7:4001' is not a multiaddress"),
        ({"peers": ("/ip4/203.0.113.7/tcp/4001",)}, "--peer: .* append /p2p/"),
        ({"peers": ("/ip4/203.0.113.7/tcp/4001/p2p/abc",)}, "--peer: .* does not end in a peer id; append the one"),
        ({"peers": (PEER.replace("4001", "99999"),)}, "--peer: .* has no port behind /tcp/ or /udp/; use 0 to 65535"),
        ({"peers": (PEER.replace("203.0", "999.0"),)}, "--peer: .* has no address of ip4 behind /ip4/; correct it"),
        ({"listen": ("/ip6/zz/tcp/0",)}, "--listen: '/ip6/zz/tcp/0' has no address of ip6"),
        ({"listen": ("/ip4/127.0.0.1/tcp/",)}, "--listen: '/ip4/127.0.0.1/tcp/' is not a multiaddress"),
        ({"listen": ("0.0.0.0",)}, "--listen: '0.0.0.0' is not a multiaddress"),
        ({"device": "tpu"}, "--device: 'tpu' is not a device; use auto, cpu, cuda, cuda:N, all or mps"),
        ({"device": "cuda:x"}, "--device: 'cuda:x' is not a device"),
        ({"devices": "0,0"}, "--devices: '0,0' is not a list of different cards; use 0,1"),
        ({"devices": "0,cpu"}, "--devices: '0,cpu' is not a list of different cards"),
        ({"devices": ""}, "--devices: '' is not a list"),
        ({"devices": "0,1", "device": "cpu"}, "--device and --devices exclude each other; remove one"),
        ({"metrics": "0.0.0.0:70000"}, "--metrics: .* is not an address"),
        ({"metrics": "192.0.2.1:80"}, "--metrics: .* all interfaces"),
        ({"direct": "abc"}, "--direct: 'abc' is not a port; use 0 to 65535, or off$"),
        ({"direct": "70000"}, "--direct: '70000' is not a port; use 0"),
        ({"direct": ""}, "--direct: '' is not a port; use 0"),
        ({"name": "a\x07b"}, r"--name: 'a\\x07b' has control characters, .*; remove them"),
        ({"threads": 0}, "--threads: must be at least 1"),
        ({"threads": 100_000}, "--threads: 100000 threads are too many for .* cores; leave"),
        ({"folder": Path(os.fsdecode(b"caf\xe9"))}, r"--dir: the path 'caf\\udce9' is not UTF-8 text; use another"),
        ({"name": os.fsdecode(b"caf\xe9")}, "--name: must be UTF-8 text"),
        ({"upload": 0.0}, "--upload: "),
        ({"log": ("paper",)}, "--log: "),
        ({"recompute": "half"}, "--recompute: .*'none', 'selective' or 'full'"),
        ({"colour": 1}, "--colour: "),
    ],
)
def test_invalid_value_raises_one_line_that_names_the_option(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        make_options(**changes)
    assert "\n" not in str(caught.value)


def test_logger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.options.is_installed", lambda name: name == "tensorboard")
    assert make_options(log=("tensorboard", "tensorboard")).log == ("tensorboard",)
    with pytest.raises(UsageError, match=r"--log: the package wandb is not installed; .*murmuration\[wandb\]"):
        make_options(log=("wandb",))


def test_threads_per_process_is_at_least_one() -> None:
    assert threads_per_process(1) >= 1
    assert threads_per_process(10_000) == 1

"""Files of peers: units, and refusals that name the key."""

from pathlib import Path

import pytest

from node.commands.plan.peers import load_peers
from protocol.errors import ManifestError, MissingFileError

CARD = '[[peer]]\nname = "card"\ncount = 4\ntflops = 10\nup = "20mbit"\ndown = "100mbit"\nmemory = "8GB"\n'


def test_file_gives_rates_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "peers.toml").write_text(CARD + 'rtt = 30\n[[peer]]\nname = "two"\ntflops = 0.1\nup = "2.5MB"\n'
                                         'down = "5MB"\nmemory = "16GiB"\ndevice = "cpu"\n')  # fmt: skip
    card, two = load_peers(tmp_path / "peers.toml")
    assert (card.count, card.flops, card.up, card.down, card.memory, card.rtt) == (4, 1e13, 2.5e6, 12.5e6, 8e9, 30)
    assert (two.count, two.up, two.memory, two.device) == (1, 2.5e6, 2**34, "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table .peer. is missing"),
        ("peer = 3\n", "peer"),
        (CARD.replace("tflops", "speed"), "unknown key"),
        (CARD.replace("10", "0"), r"peer.0.tflops \(line 4\): must be greater than 0"),
        (CARD.replace("10", "nan"), "peer.0.tflops"),
        (CARD.replace('"20mbit"', "20"), r"peer.0.up \(line 5\): must be a rate in quotes"),
        (CARD.replace('"20mbit"', '"20mb"'), r"peer.0.up \(line 5\): must be a rate of at least 256kbit"),
        (CARD.replace('"8GB"', '"big"'), r"peer.0.memory \(line 7\): must be a size"),
        (CARD.replace("= 4", "= 20000"), r"peer.0.count \(line 3\): must be at most"),
        (CARD.replace("= 4", "= 9999") * 2, "more than 10000 peers"),
        (CARD.replace('"card"', '"a\\u001bb"'), "without control characters"),
        (CARD + "rtt = 2026-01-01\n", "not valid TOML: no key takes a date"),
        ("[[peer\n", "not valid TOML"),
        ("#" * 70_000, "at most 65536 bytes"),
    ],
)
def test_unusable_files_are_refused_on_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "peers.toml").write_text(text)
    with pytest.raises(ManifestError, match=message) as refused:
        load_peers(tmp_path / "peers.toml")
    assert "\n" not in str(refused.value) and "peers.toml" in str(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="cannot read the peers"):
        load_peers(tmp_path / "none.toml")

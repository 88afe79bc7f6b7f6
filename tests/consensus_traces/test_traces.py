"""Golden traces of the round machine: each file holds commands, and below each what the machines did.

Read them to see a protocol step, or review their difference to see what a change does. `pytest tests/consensus_traces
--rewrite-traces` writes them again. The commands are explained in `traced_cluster`.
"""

from pathlib import Path

import pytest

from protocol.consensus.machine import RoundMachine
from tests.consensus_traces.traced_cluster import TracedCluster

SEPARATOR = "----"
FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_machines_do_what_the_trace_says(path: Path, pytestconfig: pytest.Config) -> None:
    expected = path.read_text()
    found = replay(expected)
    if pytestconfig.getoption("--rewrite-traces"):
        path.write_text(found)
    else:
        assert found == expected, "review the difference, then run pytest with --rewrite-traces"


def test_a_change_of_the_protocol_shows_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    text = next(path for path in FILES if path.stem == "plain_round").read_text()
    monkeypatch.setattr(RoundMachine, "_speculate", lambda self: None)
    assert replay(text) != text


def replay(text: str) -> str:
    """Run the commands of a trace and return the text with what they do now."""
    cluster: TracedCluster | None = None
    blocks = list[str]()
    for block in text.strip().split("\n\n"):
        head = block.split(f"\n{SEPARATOR}")[0]
        *comments, command = head.split("\n")
        words = [word for word in command.split() if "=" not in word]
        options = dict(word.split("=") for word in command.split() if "=" in word)
        if command.startswith("#"):
            blocks.append(block)
        elif words[0] == "cluster":
            cluster = TracedCluster(int(words[1]), words[2], int(options.get("parts", 1)))
            blocks.append(head)
        else:
            assert cluster is not None, "a trace begins with `cluster`"
            trace = cluster.run(words, options)
            blocks.append("\n".join([head, SEPARATOR, *([trace] if trace else [])]))
    return "\n\n".join(blocks) + "\n"

"""The findings of the doctor for people, at any width."""

import pytest

from node.commands.doctor.checks import Check
from node.commands.doctor.command import format_findings

FINDINGS = [
    Check("version", "ok", "murmur 0.1.0, torch 2.9.0"),
    Check("peers' version", "warn", "no peer has ours " * 6, "install the version of the run, " * 5),
    Check("key", "fail", "/a/key may be read by others", "chmod 600 /a/key"),
]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_and_remedies_stand_below(width: int) -> None:
    lines = list(format_findings(FINDINGS, width))
    assert max(map(len, lines)) <= width
    assert lines[0] == "version         ok    murmur 0.1.0, torch 2.9.0"
    assert lines[-1].strip() == "-> chmod 600 /a/key"
    assert sum(line.startswith(("version", "peers", "key")) for line in lines) == 3
    assert sum("->" in line for line in lines) >= 2


def test_colour_takes_no_room() -> None:
    plain, coloured = (list(format_findings(FINDINGS, 80, has_colours)) for has_colours in (False, True))
    assert len(plain) == len(coloured) and "\x1b[31mfail" in coloured[-2]

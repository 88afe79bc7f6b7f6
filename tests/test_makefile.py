"""The targets of the Makefile that name folders run all tests that have their mark."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKS = {"processes": "swarm", "hostile": "hostile", "seeds": "seeds", "links": "netlab"}
OTHER_MARKS = {"processes": ("hostile",)}  # whose files another target runs


def paths_of(target: str, makefile: str) -> list[Path]:
    makefile = makefile.replace("\\\n\t", "")
    variables = dict(re.findall(r"^([A-Z]+) := (tests/.*)$", makefile, re.MULTILINE))
    recipe = re.search(rf"^{target}:.*\n\t.*pytest (.*) -m ", makefile, re.MULTILINE)
    assert recipe
    words = re.sub(r"\$\(([A-Z]+)\)", lambda found: variables.get(found[1], ""), recipe[1]).split()
    return [ROOT / word for word in words if word.startswith("tests/")]


def missed_files(target: str, makefile: str) -> list[str]:
    """Return the test files with the mark of a target that it does not run."""
    paths = paths_of(target, makefile)
    found = []
    for file in ROOT.glob("tests/**/test_*.py"):
        marks = set(re.findall(r"pytest\.mark\.(\w+)", file.read_text()))
        is_other = not marks.isdisjoint(OTHER_MARKS.get(target, ()))
        if MARKS[target] in marks and not is_other and not any(file.is_relative_to(path) for path in paths):
            found.append(str(file.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("target", MARKS)
def test_target_runs_every_file_with_its_mark(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert missed_files(target, makefile) == []
    for path in paths_of(target, makefile):
        fewer = makefile.replace(str(path.relative_to(ROOT)), "tests/nowhere")
        assert missed_files(target, fewer), "the control: without one of its paths it misses files"

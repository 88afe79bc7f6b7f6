"""Check which package imports which, and that the figures of tests/ratchet.py do not rise."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ratchet import find_circles, find_risen, lower, measure, read_ceilings, read_sources

FORBIDDEN = {
    "protocol": {"node", "optim", "torch"},
    "optim": {"node", "protocol", "socket", "asyncio"},
    "node": {"tests", "benchmarks"},
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "imports are absolute"
            yield statement.module or ""


def find_violations(package: str, tree: ast.AST) -> list[str]:
    return [name for name in imports(tree) if name.split(".")[0] in FORBIDDEN[package]]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Collecting may log another test's traceback, which parses source: inside ast.parse that fails (gh-106905)."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows(package: str) -> None:
    sources = read_sources(package)
    assert sources
    found = {source.path: find_violations(package, source.tree) for source in sources}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_the_check_sees_what_it_forbids() -> None:
    def violations(package: str, text: str) -> list[str]:
        return find_violations(package, ast.parse(text))

    assert violations("protocol", "import torch.nn\nfrom node import daemon") == ["torch.nn", "node"]
    assert violations("optim", "def late():\n    from protocol.errors import MurmurError") == ["protocol.errors"]
    assert violations("node", "import tests.swarm") == ["tests.swarm"]
    assert violations("node", "import protocol.identity, optim, torch") == []


@pytest.mark.timeout(600)  # a few seconds, unless other programs hold the processors
def test_figures_do_not_rise() -> None:
    risen = find_risen(measure(), read_ceilings())
    assert not risen, "\n" + "\n".join(risen)


@pytest.fixture
def bad_house(tmp_path: Path) -> Path:
    """Return a root whose product has each fault at least once."""
    for name, text in BAD_HOUSE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


BAD_HOUSE = {
    "node/__init__.py": "",
    "node/one.py": """import node.two


class Keeper:
    def watch(self):
        \"""Of each file its size.\"""
        self.call(lambda: self.size)


class Sink(Protocol):
    def put(self): ...


class Source(typing.Protocol):
    def get(self): ...
""",
    "node/two.py": """from node import one  # nobody is told of what comes
from node.three import Source


class Keeper:
    async def run(self):
        \"""Return what arrives.\"""
        while True:
            if self.ready:
                await asyncio.sleep(1)
            for entry in self.entries:
                self.look(entry)
""",
    "node/three.py": """def limit(table):
    \"""Return the table.\"""
    del table[next(iter(table))]
    table.pop(next(iter(table)), None)
    table.order.popitem(last=False)
""",
    "node/four_pb2.py": "class Keeper: ...\n",
    "protocol/clean.py": """class _Record: ...


def wait():
    \"""Wait until the text "# is no comment" ends.

    It is not a folder.
    \"""
    for second in range(3):
        start(lambda: second)
    time.sleep(1)
    del table[key], other[next(iter(table))]
""",
    "optim/clean.py": "class _Record: ...\n",
}


def test_each_figure_counts_its_fault(bad_house: Path) -> None:
    found = {name: finding.figure for name, finding in measure(bad_house).items()}
    assert found == {
        "modules": 5,
        "modules_in_circles": 2,
        "double_class_names": 1,
        "protocols_named_in_one_file": 1,
        "lambdas_over_self": 1,
        "docstrings_with_return_percent": 50,
        "docstrings_without_verb": 1,
        "free_relatives": 1,
        "calques": 2,
        "sleep_loops": 1,
        "bounded_dicts_by_hand": 3,
    }


def test_places_of_faults_are_named(bad_house: Path) -> None:
    found = measure(bad_house)
    assert found["modules_in_circles"].places == ["node.one <-> node.two"]
    assert found["double_class_names"].places == ["Keeper: node/one.py:4, node/two.py:5"]
    assert found["protocols_named_in_one_file"].places == ["node/one.py:10 Sink"]
    assert found["sleep_loops"].places == ["node/two.py:8"]


def test_protocol_that_a_test_names_is_not_a_fault(bad_house: Path) -> None:
    (bad_house / "tests").mkdir()
    (bad_house / "tests/fake.py").write_text("class FakeSink(Sink): ...\n")
    assert measure(bad_house)["protocols_named_in_one_file"].figure == 0


def test_circles_are_found_among_longer_ways() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str](), "f": {"g", "a"}, "g": {"f"}}
    assert find_circles(graph) == [["a", "b", "c"], ["f", "g"]]
    assert find_circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set[str]()}) == []


def test_risen_figure_is_reported_with_advice_and_places(bad_house: Path) -> None:
    found = measure(bad_house)
    ceilings = {name: finding.figure for name, finding in found.items()}
    assert find_risen(found, ceilings) == []
    (message,) = find_risen(found, ceilings | {"lambdas_over_self": 0})
    assert "lambdas_over_self is 1, its ceiling 0" in message and "tests/ratchet.toml" in message
    assert message.endswith("\n    node/one.py:7")


def test_ceilings_only_fall(bad_house: Path) -> None:
    text = "# note = 9\nmodules = 700\ncalques = 1\n"
    assert lower(measure(bad_house), text) == "# note = 9\nmodules = 5\ncalques = 1\n"

"""Check which package imports which, what nobody may use, and that folders and files stay small."""

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILES = 40  # of a folder
MAX_LINES = 900  # of a file
WRITTEN = ("murmuration", "node", "optim", "protocol", "benchmarks", "tests")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
FORBIDDEN = {
    "protocol": {"node", "optim", "torch", "pickle", "marshal", "shelve"},
    "optim": {"node", "protocol", "pickle", "marshal", "shelve", "socket", "asyncio"},
    "node": {"pickle", "marshal", "shelve", "tests", "benchmarks"},
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "imports are absolute"
            yield statement.module or ""


def unsafe_loads(tree: ast.AST) -> Iterator[int]:
    """Lines that call torch.load or numpy's allow_pickle."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            if ast.unparse(call.func) in {"torch.load", "torch.save"}:
                yield call.lineno
            yield from (call.lineno for keyword in call.keywords if keyword.arg == "allow_pickle")


def find_violations(package: str, source: str) -> list[str]:
    tree = ast.parse(source)
    names = [name for name in imports(tree) if name.split(".")[0] in FORBIDDEN[package]]
    return [f"imports {name}" for name in names] + [f"line {line} loads by pickle" for line in unsafe_loads(tree)]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Collecting may log another test's traceback, which parses source: inside ast.parse that fails (gh-106905)."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(file.relative_to(ROOT)): find_violations(package, file.read_text()) for file in files}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_the_check_sees_what_it_forbids() -> None:
    assert find_violations("protocol", "import torch.nn\nfrom node import daemon") == [
        "imports torch.nn",
        "imports node",
    ]
    assert find_violations("optim", "def late():\n    from protocol.errors import MurmurError") == [
        "imports protocol.errors"
    ]
    assert find_violations("node", "import torch\nweights = torch.load(path)") == ["line 2 loads by pickle"]
    assert find_violations("node", "import protocol.identity, optim, torch") == []


def find_crowds(files: list[str]) -> dict[str, int]:
    """Return the folders with too many hand-written files."""
    folders = Counter(str(Path(name).parent) for name in files if not GENERATED.search(name))
    return {folder: count for folder, count in folders.items() if count > MAX_FILES}


def test_folders_stay_small() -> None:
    files = [file for package in WRITTEN if package != "benchmarks" for file in (ROOT / package).rglob("*.py")]
    assert find_crowds([str(file.relative_to(ROOT)) for file in files]) == {}


def test_the_check_sees_a_crowded_folder() -> None:
    full = [f"optim/part_{number}.py" for number in range(MAX_FILES)]
    assert find_crowds([*full, "optim/codecs/one.py", "optim/murmur_pb2_grpc.py"]) == {}
    assert find_crowds([*full, "optim/one_more.py"]) == {"optim": MAX_FILES + 1}


def find_long(sources: dict[str, str]) -> dict[str, int]:
    """Return the hand-written files with too many lines."""
    lines = {name: text.count("\n") for name, text in sources.items() if not GENERATED.search(name)}
    return {name: count for name, count in lines.items() if count > MAX_LINES}


def test_files_stay_short() -> None:
    files = [file for package in WRITTEN for file in (ROOT / package).rglob("*.py")]
    assert find_long({str(file.relative_to(ROOT)): file.read_text() for file in files}) == {}


def test_the_check_sees_a_long_file() -> None:
    full = "\n" * MAX_LINES
    assert find_long({"node/full.py": full, "node/one_pb2.py": full + "\n"}) == {}
    assert find_long({"node/long.py": full + "\n"}) == {"node/long.py": MAX_LINES + 1}

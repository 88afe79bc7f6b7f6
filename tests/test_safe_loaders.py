"""Nothing in the packages unpickles, executes text or loads remote code. Static, over the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("murmuration", "node", "protocol", "optim")
ALLOWED = {
    ("optim/kernels/jit.py", "exec"),  # the kernel compiler runs text of our own
    ("node/own_modules.py", "exec"),  # a file that this machine's user allowed by --import, whose digest is the run's
    ("node/own_modules.py", "compile"),
}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    ("torch", "load"), ("torch", "save"), ("torch.jit", "load"), ("numpy", "load"), ("np", "load"),
    ("torch.hub", "load"), ("os", "system"), ("os", "popen"),
}  # fmt: skip
KEYWORDS = {"trust_remote_code": (False,), "allow_pickle": (), "weights_only": (True,), "shell": (False,)}


def find_dangers(text: str) -> Iterator[str]:
    """Yield the name of each construct that runs or unpickles what it is given."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _dangers_of_call(node)


def _dangers_of_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield function.id
    if isinstance(function, ast.Attribute) and (ast.unparse(function.value), function.attr) in ATTRIBUTES:
        yield ast.unparse(function)
    for keyword in node.keywords:
        allowed = KEYWORDS.get(keyword.arg or "")
        if allowed is not None and not (isinstance(keyword.value, ast.Constant) and keyword.value.value in allowed):
            yield str(keyword.arg)


def test_packages_run_and_unpickle_nothing() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    found = {(path.relative_to(ROOT).as_posix(), name) for path in files for name in find_dangers(path.read_text())}
    assert found <= ALLOWED, found - ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import yaml", "torch.load(path)", "torch.save(x, path)",
        "np.load(file)", "eval(x)", "exec(x)", "f(trust_remote_code=True)", "f(allow_pickle=x)",
        "f(allow_pickle=False)", "torch.load(p, weights_only=False)", "run(x, shell=True)", "os.system(x)",
        "from dill import load", "import cloudpickle as c",
    ],
)  # fmt: skip
def test_each_danger_is_seen(text: str) -> None:
    assert list(find_dangers(text))


def test_harmless_code_is_not_taken_for_a_danger() -> None:
    for text in ("json.loads(x)", "f(trust_remote_code=False)", "safetensors.torch.load_file(p)", "re.compile(x)"):
        assert not list(find_dangers(text))

import errno
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import node.cli
from node.commands.console import run_guarded
from node.flags import NodeFlags
from protocol import errors

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMANDS = ("up", "join", "export", "generate", "tokenize", "status", "key", "host", "replay", "doctor")
LIGHT = {
    *("node", "node.cli", "node.commands", "node.commands.console", "node.flags"),
    *("node.processes", "node.processes.process"),
    "node.commands.models",
    *("protocol", "protocol.errors"),
}


def murmur(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the line on standard error; there must be one, and no traceback."""
    assert result.stdout == ""
    assert result.stderr.startswith("murmur: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("murmur: ").rstrip()


def test_help_names_every_command_with_examples() -> None:
    result = murmur("--help")
    assert result.returncode == 0
    assert set(re.findall(r"^  (\w+)  ", result.stdout, re.MULTILINE)) >= set(COMMANDS)
    assert "Examples:" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = murmur(command, "-h")
    assert result.returncode == 0
    assert f"Example: murmur {command} " in result.stdout


@pytest.mark.parametrize("command", ("up", "doctor", "tokenize", "status", "sim", "recipes"))
def test_usage_line_has_single_brackets(command: str) -> None:
    usage = murmur(command, "-h").stdout.splitlines()[0]
    assert re.search(r"\[OPTIONS\]( [\[{]\w+(\.toml)?[\]}](\.\.\.)?)+$", usage), usage
    assert not re.search(r"[a-z]", usage.split("[OPTIONS]")[1].replace(".toml", "")), usage


def test_help_imports_nothing_heavy() -> None:
    program = "import sys, node.cli; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    imported = set(result.stdout.split())
    assert not imported & {"torch", "grpc", "starlette", "uvicorn", "pydantic", "numpy", "google", "rich"}
    assert not any(name.startswith("hivemind.") for name in imported)
    assert {name for name in imported if name.split(".")[0] in ("node", "protocol", "optim")} == LIGHT


LIGHT_COMMANDS = (
    ("init", "run.toml", "--yes"),
    ("recipes",),
    ("recipes", "frugal"),
    ("status", "."),
    ("steer", "-h"),
    ("verify", "a", "b"),
    ("plan", "run.toml"),
)


@pytest.mark.parametrize("words", LIGHT_COMMANDS, ids=" ".join)
def test_commands_that_compute_nothing_do_not_load_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    if words[0] == "plan":
        murmur("init", str(tmp_path / "run.toml"), "--yes")
    program = (
        f"import sys, node.cli; sys.argv = ['murmur', *{words!r}]\n"
        "try: node.cli.main()\nfinally: print(*sys.modules.keys() & {'torch', 'numba', 'grpc'}, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == "", result.stderr
    assert words[0] != "plan" or "of the compute of all peers" in result.stdout


def test_help_is_fast() -> None:
    """The limit is CPU time, which equals wall time on an idle machine."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        murmur("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3, took


def test_version() -> None:
    assert re.fullmatch(r"murmur \d+\.\d+\.\d+\n", murmur("--version").stdout)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("up", "nowhere.toml"), 4, "cannot read the manifest nowhere.toml: No such file or directory; name an"),
        (("status", "nowhere"), 4, "nowhere is not a directory; name the --dir of `murmur join` or `murmur up`"),
        (("export", "nowhere", "out"), 4, "nowhere is not a directory; name the --dir"),
        (("generate", ".", "--prompt", "x"), 8, "no checkpoint in .; name the --dir"),
        (("up", "bad.toml"), 3, "bad.toml: unknown table modl (line 2); did you mean model?"),
        (("key", "/etc/passwd"), 2, "/etc/passwd is not a directory; name a node's folder"),
        (("status", "x" * 5000), 4, "cannot use xxxxxxxxxxxxx"),
        (("join", "ftp://x/y"), 2, "ftp://x/y is not a run; give a file, an http(s) URL or murmur://"),
        (("join", "murmur://abc@x"), 2, "write it like murmur://RUN_ID@/ip4/"),
        (("join", "http://localhost:99999/run.toml"), 2, "http://localhost:99999/run.toml is not a URL (the port must"),
        (("sim", "frugal", "--set", "codec.k=" + "9" * 5000), 2, "--set 'codec.k=99999"),
    ],
)
def test_user_error_is_one_line_and_an_exit_code(tmp_path: Path, words: tuple[str, ...], code: int, text: str) -> None:
    (tmp_path / "bad.toml").write_text("\n[modl]\nwidth = 3\n")
    result = murmur(*words, folder=tmp_path)
    assert one_line(result).startswith(text)
    assert result.returncode == code


@pytest.mark.parametrize(
    "words", [("uup",), ("up", "--peers", "0"), ("up", "--colour"), ("join",), ("up", "--device", "tpu")]
)
def test_usage_errors_exit_with_two(words: tuple[str, ...]) -> None:
    result = murmur(*words)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("up", "--peers", "x"), "Error: Invalid value for '--peers': must be a whole number"),
        (("up", "--peers", "0"), "Error: Invalid value for '--peers': must be at least 1"),
        (("generate", ".", "--prompt", "x", "--temperature", "nan"), "'--temperature': must be at least 0"),
        (("generate", ".", "--prompt", "x", "--seed", str(2**63)), f"'--seed': must be at most {2**63 - 1}"),
        (("up", "--recompute", "half"), "Error: Invalid value for '--recompute': 'half' is not one of"),
    ],
)
def test_refused_values_are_described_in_our_words(words: tuple[str, ...], text: str) -> None:
    """Control: the library's own words begin with `Input should`."""
    last = murmur(*words).stderr.splitlines()[-1]
    assert text in last and "Input" not in last and "Value error" not in last


def test_path_without_permission_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Control: an error of the operating system that names no file is a fault of our own."""

    def fail(name: str | None) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    assert run_guarded(lambda: fail("/root/x")) == errors.MissingFileError.exit_code
    assert capsys.readouterr().err == "murmur: cannot use /root/x: Permission denied; name another file or folder\n"
    with pytest.raises(PermissionError):
        run_guarded(lambda: fail(None))


@pytest.mark.parametrize("kind", errors.MurmurError.__subclasses__())
def test_every_error_has_a_line_and_an_exit_code(
    kind: type[errors.MurmurError], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("mend this")

    assert run_guarded(fail) == kind.exit_code
    assert capsys.readouterr().err == "murmur: mend this\n"


def test_text_from_peers_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = "refused (x\nmurmur: forged\x1b[2J)"

    def fail() -> None:
        raise errors.UnreachableError(said)

    run_guarded(fail)
    assert capsys.readouterr().err == "murmur: refused (x\ufffdmurmur: forged\ufffd[2J)\n"
    assert not said.isprintable(), "the control: it would"


def test_exit_codes_are_distinct_and_documented() -> None:
    kinds = [kind for kind in errors.MurmurError.__subclasses__() if kind is not errors.PeerFault]
    codes = [kind.exit_code for kind in kinds]
    assert len(codes) == len(set(codes))
    table = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert documented == sorted({0, 1, 130, *codes})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """Record the arguments that the commands pass on."""
    calls: list[tuple[object, ...]] = []

    def module(**functions: object) -> SimpleNamespace:
        return SimpleNamespace(**functions)

    def note(*words: object, **named: object) -> list[str]:
        calls.append((*words, *sorted(named.items())))
        return ["text"]

    monkeypatch.setitem(sys.modules, "node.model.export", module(export=note))
    generation = module(continue_text=note, require_sampling=note, Sampling=lambda *words: words)
    monkeypatch.setitem(sys.modules, "node.model.generate", generation)
    console = module(open_model=lambda source, *_: source, named_device=lambda name: name)
    monkeypatch.setitem(sys.modules, "node.commands.console", console)
    evaluation = module(EvalOptions=dict, evaluate=lambda options: note(**options), print_results=note)
    monkeypatch.setitem(sys.modules, "node.commands.eval.command", evaluation)
    monkeypatch.setitem(sys.modules, "node.commands.join.command", module(join_run=note))
    monkeypatch.setitem(sys.modules, "node.data.token_shards", module(tokenize_files=lambda *words: len(note(*words))))
    yield calls


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["murmur", *words])
    with pytest.raises(SystemExit) as ended:
        node.cli.main()
    assert ended.value.code == 0


def test_commands_pass_on_their_arguments(
    called: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "checkpoints").mkdir()
    run(monkeypatch, "export", str(tmp_path), "out", "--merged")
    run(monkeypatch, "generate", str(tmp_path), "--prompt", "def ", "--tokens", "9", "--seed", "3", "--top-p", "0.9",
        "--device", "cuda:1")  # fmt: skip
    run(monkeypatch, "tokenize", "words.json", "shards", "a.txt", "b.txt")
    assert called == [
        (tmp_path, Path("out"), ("merged", True), ("repository", "")),
        ("def ", 9, (0.8, None, 0.9, 3)),
        (str(tmp_path), "def ", 9, (0.8, None, 0.9, 3), "cuda:1"),
        (Path("words.json"), [Path("a.txt"), Path("b.txt")], Path("shards")),
    ]
    assert "def text\n" in capsys.readouterr().out


def test_eval_passes_on_every_option(called: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--tasks a,b --tasks c --data run.toml --limit 5 --batch 2 --device cpu --peer /a --insecure --allow-data"
    run(monkeypatch, "eval", "model", *options.split(), "--json")
    assert dict(called[0]) == {  # type: ignore[arg-type]
        "source": "model",
        "tasks": ("a,b", "c"),
        "data": Path("run.toml"),
        "limit": 5,
        "batch": 2,
        "device": "cpu",
        "peers": ("/a",),
        "insecure": True,
        "allow_data": True,
    }
    assert called[1] == (["text"], True)


def test_join_passes_on_every_option(called: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--dir d --peer /a --peer /b --device cpu --name n --threads 2 --listen /c --metrics :7 --log-json -v"
    options += " --memory 4GB --compile --recompute full --weights bf16 --fp8 --pause-when-busy --direct off"
    options += " --upload 20mbit --download 1MB --devices 0,1 --memory-mode small"
    options += " --disk 9GB --ticket abc --trust 7:def --accept-jump --allow-data --stage 2 --own-loop"
    options += " --log tensorboard --log wandb --site 10.0.0.1:29400 --site-shard all --base-model b --role rollout"
    run(monkeypatch, "join", "run.toml", *options.split(), "--insecure")
    run_argument, flags, *keywords = called[0]
    assert run_argument == "run.toml" and isinstance(flags, NodeFlags)
    assert asdict(flags) | dict(keywords) == {  # type: ignore[arg-type]
        "role": "rollout",
        "folder": Path("d"),
        "peers": ["/a", "/b"],
        "device": "cpu",
        "name": "n",
        "threads": 2,
        "memory": "4GB",
        "compile": True,
        "fp8": True,
        "devices": "0,1",
        "memory_mode": "small",
        "recompute": "full",
        "weights": "bf16",
        "pause_when_busy": True,
        "listen": ["/c"],
        "metrics": ":7",
        "log_json": True,
        "verbose": True,
        "insecure": True,
        "upload": "20mbit",
        "download": "1MB",
        "direct": "off",
        "disk": "9GB",
        "ticket": Path("abc"),
        "trust": "7:def",
        "accept_jump": True,
        "allow_data": True,
        "stage": "2",
        "own_loop": True,
        "log": ["tensorboard", "wandb"],
        "site": "10.0.0.1:29400",
        "site_shard": "all",
        "base_model": "b",
    }

"""The small runs of `benchmarks.card`: real peers with one option each, on a card or at a tiny size on a CPU.

A run is right if its command ends with 0, all peers have the same digest, the validation loss has fallen, and it is at
most `MAX_DIFFERENCE` from that of the run `plain`, which has the same model and text. Where a device lacks what a run
needs, the product must refuse it with the exit code of DeviceError, and that is the right result there.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.adapters import make_base
from node.daemon.checkpoints.trained_weights import load_trained_weights
from node.model.generate import Completion, Sampling, TextGenerator, complete
from node.model.opened_model import open_folder
from node.processes.process import python_environment
from protocol.errors import DeviceError

ROOT: Final = Path(__file__).parents[1]
MURMUR: Final = (sys.executable, "-c", "from node.cli import main; main()")
MAX_DIFFERENCE: Final = 0.05  # of the validation loss, as a share of that of `plain`
MAX_GAP: Final = 1e-3  # of two log probabilities in nats: with the cache, and without it
MAX_GAP_OF_DEVICES: Final = 0.05  # the same of a card and a CPU
LOG_CHARACTERS: Final = 400
GRACE_SECONDS: Final = 8.0
JOIN_SECONDS: Final = 90.0
MANIFEST: Final = """
[run]
name = "{name}"
min_peers = {peers}
[model]
{model}
width = {width}
layers = {layers}
heads = {heads}
hidden = {hidden}
context = {context}
[data]
source = "python-stdlib"
[train]
batch_tokens = {batch}
microbatch = {microbatch}
learning_rate = 1e-3
[method]
recipe = "{recipe}"
{method}
[round]
grace = 10.0
leader_timeout = 5.0
exchange_timeout = 40.0
{rest}
[target]
rounds = {rounds}
"""
SIZES_OF_MODEL: Final = re.compile(
    r"^(?:width|layers|heads|hidden|context) = .*\n", re.MULTILINE
)  # config.json has them
Sizes = Mapping[str, int]
CARD_SIZES: Final[Sizes] = dict(width=256, layers=4, heads=4, hidden=704, context=256, batch=8192, microbatch=16)
CPU_SIZES: Final[Sizes] = dict(width=64, layers=2, heads=2, hidden=128, context=64, batch=512, microbatch=4)
BYTES: Final = "vocabulary = 256\n"
EXPERTS: Final = f'{BYTES}kind = "qwen3-moe"\nkv_heads = 2\nexperts = 8\nexperts_per_token = 2'
CUT: Final = (
    '[pipeline]\nstages = 2\nmicrobatch = 4\nin_flight = 16\nmode = "{mode}"\n[membership]\nheartbeat = 0.5\nexpiry = 4'
)
Result = dict[str, Any]


class RunFailed(Exception):  # noqa: N818
    """A run that did not do what it should."""


@dataclass(frozen=True)
class Workshop:
    """The place of all runs of one call: folders in `work`, logs in `logs`, a device `cuda` or `cpu`."""

    work: Path
    device: str
    cards: int = 0
    threads: int | None = None  # of each peer
    plain_loss: float | None = None  # of the run `plain` on this device

    @property
    def is_card(self) -> bool:
        return self.device == "cuda"

    @property
    def sizes(self) -> Sizes:
        return CARD_SIZES if self.is_card else CPU_SIZES

    def folder(self, name: str) -> Path:
        """Return an empty folder."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


@dataclass(frozen=True)
class Run:
    """`murmur up` with one option.

    Attributes:
        model, method, rest: more keys of the manifest.
        compares: the loss is compared with that of `plain`.
        needs: what the device must have: "card" (the CPU refuses it) or "cards" (more than one of them).
    """

    name: str
    flags: tuple[str, ...] = ()
    peers: int = 2
    rounds: int = 3
    model: str = BYTES
    recipe: str = "frugal"
    method: str = "[method.schedule]\ninner_steps = 8\nahead = 8"
    rest: str = ""
    sizes: Sizes = field(default_factory=dict)
    compares: bool = False
    needs: str = ""

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Run it, and return its figures. Raises RunFailed."""
        folder = shop.folder(self.name)
        command = ["up", str(self.write_manifest(shop, folder)), "--json", "--peers", str(self.peers)]
        command += ["--dir", str(folder / "swarm"), *self._device_flags(shop), *self.flags]
        command += ["--threads", str(shop.threads)] if shop.threads else []
        refused = self.needs == "card" and not shop.is_card
        done = murmur(command, folder, seconds, DeviceError.exit_code if refused else 0)
        if refused:
            return {"refused": last_line(done)}
        return self._check(json.loads(done), shop)

    def _device_flags(self, shop: Workshop) -> tuple[str, ...]:
        if self.needs != "cards":
            return ("--device", shop.device)
        return ("--devices", ",".join(map(str, range(shop.cards))) if shop.is_card else "cpu,cpu")

    def write_manifest(self, shop: Workshop, folder: Path) -> Path:
        path = folder / "run.toml"
        values = {"name": self.name, "peers": self.peers, "rounds": self.rounds, **shop.sizes, **self.sizes}
        parts = {"model": self.model, "recipe": self.recipe, "method": self.method, "rest": self.rest}
        text = MANIFEST.format(**values, **parts)
        path.write_text(SIZES_OF_MODEL.sub("", text) if self.model.startswith("from") else text)
        return path

    def _check(self, report: Mapping[str, Any], shop: Workshop) -> Result:
        first, last = report["initial_validation_loss"], report["validation_loss"]
        result = {
            "rounds": report["rounds"],
            "losses": [round(first, 4), round(last, 4)],
            "computing": round(report["compute_share"] or 0.0, 3),
            "digests": len(set(report["digests"].values())),
        }
        if not report["agreed"]:
            raise RunFailed(f"the peers do not agree: {report['digests']}")
        if not last < first:
            raise RunFailed(f"the validation loss went from {first:.4f} to {last:.4f}")
        if self.compares and shop.plain_loss is not None:
            result["above_plain"] = round(last / shop.plain_loss - 1, 4)
            if abs(result["above_plain"]) > MAX_DIFFERENCE:
                raise RunFailed(f"validation loss {last:.4f}, and {shop.plain_loss:.4f} without the option")
        return result


@dataclass(frozen=True)
class Recipes:
    """Several recipes, one after the other."""

    names: tuple[str, ...]

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Run all of them within `seconds`."""
        ends = time.monotonic() + seconds
        runs = {name: Run(f"recipe-{name}", recipe=name, method="", rounds=2) for name in self.names}
        short = {"diloco": 8, "sparseloco": 8, "streaming-diloco": 16, "noloco": 8}
        for name, steps in short.items():
            if name in runs:
                runs[name] = Run(f"recipe-{name}", recipe=name, method=f"[method.schedule]\ninner_steps = {steps}")
        return {name: run(shop, ends - time.monotonic())["losses"][1] for name, run in runs.items()}


@dataclass(frozen=True)
class Adapter:
    """A run of an adapter whose frozen matrices are held in `base`."""

    base: str

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Freeze a small trained model, and train an adapter of it."""
        folder = shop.folder(f"base-{self.base}")
        frozen = make_base(folder, steps=40).model
        tables = (
            f'from = "{folder}"',
            f'[adapter]\nrank = 8\nalpha = 16.0\nbase = "{self.base}"\n',
        )
        sizes = {name: getattr(frozen, name) for name in ("width", "layers", "heads", "hidden", "context")}
        run = Run(f"adapter-{self.base}", model=tables[0], rest=tables[1], sizes=sizes | {"batch": 1024})
        return run(shop, seconds)


def two_kinds(shop: Workshop, seconds: float) -> Result:
    """Train a peer on the device and one on a CPU in one run; both must end with the same digest."""
    folder, ends = shop.folder("two-kinds"), time.monotonic() + seconds
    sizes = dict(CPU_SIZES, context=128)
    manifest = Run("two-kinds", rounds=4, sizes=sizes).write_manifest(shop, folder)
    first = start(["join", str(manifest), "--dir", str(folder / "a"), "--device", shop.device], folder / "a.log")
    try:
        address = wait_for_address(folder / "a" / "node.json", first, min(JOIN_SECONDS, seconds))
        # The first weights of an invitation are those of the host: its folder has the manifest that others need.
        invited = next(path for path in (folder / "a" / "run.toml", manifest) if path.exists())
        murmur(
            ["join", str(invited), "--dir", str(folder / "b"), "--device", "cpu", "--threads", "1", "--peer", address],
            folder,
            ends - time.monotonic(),
        )
        if code := first.wait(max(1.0, ends - time.monotonic())):
            raise RunFailed(f"the first peer ended with {code}: {tail(folder / 'a.log')}")
    finally:
        stop(first)
    mine, theirs = (load_trained_weights(folder / name) for name in "ab")
    if mine.round != theirs.round or not torch.equal(mine.anchor, theirs.anchor):
        raise RunFailed(f"after round {mine.round} and {theirs.round}, the peers have other weights")
    return {"rounds": mine.round}


def generation(shop: Workshop, seconds: float) -> Result:
    """Write text with the cache and without it, on the device and on a CPU: the same tokens, and nearly the same odds.

    The model is that of the run `plain`, or a new one where there is none.
    """
    folder = shop.work / "plain" / "swarm"
    if not folder.exists():
        Run("plain")(shop, seconds)
    opened = open_folder(folder)
    prompts = [[100, 101, 102, 32], [99, 108, 97, 115, 115, 32, 65], [10]]
    sampling = Sampling(temperature=0.8, seed=1)
    written = {}
    for name, device, is_cached in (("cached", shop.device, True), ("whole", shop.device, False), ("cpu", "cpu", True)):
        writer = TextGenerator(opened, device)
        if not is_cached:
            writer.model.new_cache = lambda padding, length: None  # type: ignore[method-assign]
        written[name] = complete(writer.model, prompts, 48, sampling, writer.usable, writer.stops)
    gaps = {other: largest_gap(written["cached"], written[other]) for other in ("whole", "cpu")}
    is_same = [each.tokens for each in written["cached"]] == [each.tokens for each in written["whole"]]
    if not is_same or gaps["whole"] > MAX_GAP or gaps["cpu"] > MAX_GAP_OF_DEVICES:
        raise RunFailed(f"log probabilities differ by {gaps}; the same tokens without the cache: {is_same}")
    return {"tokens": sum(len(each.tokens) for each in written["cached"]), "gaps": gaps}


def largest_gap(ours: Sequence[Completion], others: Sequence[Completion]) -> float:
    """Return the largest difference of two log probabilities, in nats, up to the first other token of each text."""
    gaps = [0.0]
    for mine, theirs in zip(ours, others, strict=True):
        pairs = zip(mine.tokens, theirs.tokens, mine.log_probabilities, theirs.log_probabilities, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)  # a near tie may end otherwise elsewhere
        gaps += [abs(a - b) for _, _, a, b in same]
    return max(gaps)


def export_and_measure(shop: Workshop, seconds: float) -> Result:
    """Export the model of `plain`, continue a text with it, and measure it."""
    folder, ends = shop.work / "plain" / "swarm", time.monotonic() + seconds
    if not folder.exists():
        Run("plain")(shop, seconds)
    out = shop.folder("export")
    for command in (
        ["export", str(folder), str(out / "hf")],
        ["generate", str(out / "hf"), "--prompt", "def ", "--tokens", "40", "--device", shop.device],
        ["eval", str(folder), "--device", shop.device],
    ):
        text = murmur(command, out, ends - time.monotonic())
    return {"eval": last_line(text)}


@dataclass(frozen=True)
class Example:
    """A training loop of a user, from examples/."""

    script: str

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Train with one peer in the loop."""
        folder = shop.folder(Path(self.script).stem)
        sizes = dict(CPU_SIZES, context=128, batch=2048, microbatch=16)
        manifest = Run(self.script, peers=1, sizes=sizes).write_manifest(shop, folder)
        command = [sys.executable, str(ROOT / "examples" / self.script), str(manifest), "--dir", str(folder / "node")]
        return {"last": last_line(execute(command, folder, seconds))}


def device_tests(shop: Workshop, seconds: float) -> Result:
    """Run the tests that a card decides."""
    paths = ["tests/node/trainer/devices"] + (["tests/node/model"] if shop.is_card else [])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-W", "ignore", *paths]
    return {"last": last_line(execute(command, ROOT, seconds, log=shop.folder("tests") / "log"))}


def doctor(shop: Workshop, seconds: float) -> Result:
    """Ask the doctor."""
    return {"last": last_line(murmur(["doctor"], shop.folder("doctor"), seconds))}


def murmur(arguments: Sequence[str], folder: Path, seconds: float, expected: int = 0) -> str:
    """Run a command of the product; return what it wrote to standard output, or to standard error if it failed."""
    return execute([*MURMUR, *arguments], folder, seconds, expected)


def execute(command: Sequence[str], folder: Path, seconds: float, expected: int = 0, log: Path | None = None) -> str:
    """Run a command in a folder for at most `seconds`. Raises RunFailed unless its exit code is `expected`."""
    log = log or folder / "log"
    process = start(command, log, folder)
    try:
        code: int | str = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        code = f"no end after {seconds:.0f} s"
    finally:
        stop(process)
    if code != expected:
        raise RunFailed(f"{code}: {tail(log.with_suffix('.errors'))} {tail(log)}")
    return log.read_text() if expected == 0 else log.with_suffix(".errors").read_text()


def start(command: Sequence[str], log: Path, folder: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start a command of the product or another, in a session of its own, with its output in files."""
    whole = list(command) if Path(command[0]).exists() else [*MURMUR, *command]
    with log.open("wb") as out, log.with_suffix(".errors").open("wb") as errors:
        environment = python_environment()
        return subprocess.Popen(whole, stdout=out, stderr=errors, cwd=folder, start_new_session=True, env=environment)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def wait_for_address(path: Path, process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Return the first address that a node has written into its folder."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and process.poll() is None:
        if path.exists() and '"addresses"' in (text := path.read_text()):
            return str(json.loads(text)["addresses"][0])
        time.sleep(0.1)
    raise RunFailed(f"the first peer has no address after {seconds:.0f} s")


def tail(path: Path) -> str:
    """Return the end of a log, in one line."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return " ".join(text.split())[-LOG_CHARACTERS:]


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LOG_CHARACTERS] if lines else ""


def count_cards() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


Part = Callable[[Workshop, float], Result]

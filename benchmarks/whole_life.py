"""Play the whole life of a run on this machine, as its organiser and its volunteers type it.

    python benchmarks/newcomer.py --life [--record docs/results/newcomer.md]

An organiser writes a manifest with `murmur init` and hosts it; mary, john and ana join by the link of the page. One of
them is killed and comes back, the organiser extends the target, the run ends. Then a late volunteer is told that the
run is over, the model is downloaded from the page and loaded with transformers, and the receipts of all volunteers are
verified offline and added up. Every line that the commands print is recorded.
"""

import json
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from benchmarks.people import PATIENCE, Person, find_page, stop_all, wait_for

VOLUNTEERS = ("mary", "john", "ana")
TOKENS = "600k"
INTRODUCTION = """\
An organiser writes a manifest, hosts the run and steers it; mary, john and ana join from the page; john's machine is
killed and comes back; a late volunteer comes after the end. These are all lines that the commands printed on one
machine; people's home folders are shortened to their names.
`python benchmarks/newcomer.py --life --record docs/results/newcomer.md` writes this page."""


@dataclass
class Life:
    """The figures of one life, printed at the end."""

    figures: dict[str, float | int | str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def mark(self, name: str) -> None:
        """Note the seconds since the start."""
        self.figures[f"seconds until {name}"] = round(time.monotonic() - self.began, 1)


def play(folder: Path, record: Path | None) -> dict[str, float | int | str]:
    """Play a whole life below `folder`; return its figures.

    Args:
        record: where to write every line that the commands printed, as Markdown.
    """
    life = Life()
    organiser = Person("the organiser", folder / "organiser")
    people = {name: Person(name, folder / name) for name in (*VOLUNTEERS, "late")}
    running: list[subprocess.Popen[bytes]] = []
    try:
        page = _open_run(organiser, running, life)
        _train(organiser, people, page, running, life)
        _finish(people, page, running[1:], life)
        _download_model(page, folder / "download", life)
        _verify_receipts(organiser, page, folder / "receipts", life)
        running[0].send_signal(signal.SIGINT)
        running[0].wait(PATIENCE)
    finally:
        stop_all(running)
        if record is not None:
            record.write_text(_transcript([organiser, *people.values()], folder, life))
    return life.figures


def _open_run(organiser: Person, running: list[subprocess.Popen[bytes]], life: Life) -> str:
    """Write a manifest and host it; return the address of the page."""
    about = ("--description", "A tiny model of Python's library", "--organiser", "Oma", "--licence", "CC0-1.0")
    organiser.run(
        "init", "run.toml", "--yes", "--name", "life", "--size", "tiny", "--peers", "3", "--tokens", TOKENS, *about
    )
    running.append(organiser.start("host", "run.toml", "--http", "127.0.0.1:0"))
    page = find_page(organiser)
    life.mark("the page")
    return page


def _train(
    organiser: Person, people: dict[str, Person], page: str, running: list[subprocess.Popen[bytes]], life: Life
) -> None:
    """Let three volunteers join; kill one and restart it; extend the target."""
    joined = {
        name: people[name].start("join", f"{page}/run.toml", "--threads", "1", "--name", name) for name in VOLUNTEERS
    }
    running += joined.values()
    wait_for(lambda: _round(page) >= 3, "three rounds", list(joined.values()))
    life.mark("round 3")
    joined["john"].kill()
    joined["john"].wait()
    dead_at = _round(page)
    wait_for(lambda: _round(page) >= dead_at + 3, "rounds without john", list(joined.values()))
    running.append(people["john"].start("join", f"{page}/run.toml", "--threads", "1", "--name", "john"))
    print(organiser.run("steer", f"{page}/run.toml", "--set", f"target.tokens={2 * 600_000}"), file=sys.stderr)
    life.mark("the steering")


def _finish(people: dict[str, Person], page: str, joined: list[subprocess.Popen[bytes]], life: Life) -> None:
    """Wait for the end; then a late volunteer learns that the run is over."""
    wait_for(lambda: _state(page)["status"] == "done", "the end of the run", joined)
    life.mark("the end")
    people["late"].run("join", f"{page}/run.toml", "--name", "late")
    life.mark("the answer to a late volunteer")


def _state(page: str) -> dict[str, object]:
    return dict(httpx2.get(f"{page}/api/v1/state", timeout=10).json())


def _round(page: str) -> int:
    return int(str(_state(page)["round"]))


def _download_model(page: str, folder: Path, life: Life) -> None:
    """Download the model from the page and sample from it with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    archive = folder / "model.tar"
    archive.write_bytes(httpx2.get(f"{page}/model", timeout=120, follow_redirects=True).content)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "model", filter="data")
    path = next((folder / "model").rglob("config.json")).parent
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("def ", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=False)[0])
    life.figures["sample"] = text
    life.mark("a sample by transformers")


def _verify_receipts(organiser: Person, page: str, folder: Path, life: Life) -> None:
    """Verify the receipt of each volunteer against the commits, and add the tokens up."""
    folder.mkdir()
    (folder / "commits.log").write_bytes(httpx2.get(f"{page}/commits.log", timeout=60).content)
    report = httpx2.get(f"{page}/report.json", timeout=10).json()
    total = 0
    for peer in report["contributors"]:
        receipt = folder / f"{peer['peer']}.json"
        receipt.write_bytes(httpx2.get(f"{page}/receipts/{peer['peer']}.json", timeout=10).content)
        organiser.run("verify", str(receipt), str(folder / "commits.log"))
        total += int(json.loads(receipt.read_text())["tokens"])
    life.figures["tokens of the run"] = report["tokens"]
    life.figures["tokens of all receipts"] = total
    if total != report["tokens"]:
        raise RuntimeError(f"the receipts add up to {total} tokens, the run has {report['tokens']}")


def _transcript(people: list[Person], folder: Path, life: Life) -> str:
    """Return all commands and their output as Markdown."""
    figures = "\n".join(f"| {name} | {value!r} |" for name, value in life.figures.items())
    lines = [
        "# The whole life of a run",
        "",
        INTRODUCTION,
        "",
        "| figure | value |",
        "|---|---|",
        figures,
        "",
    ]
    for person in people:
        lines += [f"## {person.name}", ""]
        for command, output in person.transcript:
            text = output.read_text().replace(str(folder), "").rstrip()
            lines += ["```", f"$ {command.replace(str(folder), '')}", text, "```", ""]
    return "\n".join(lines)

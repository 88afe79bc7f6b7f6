"""A swarm of peers whose trainers sleep: its processes, and the differences between two readings of their counters."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.merge.worker import START_SECONDS, SilentError, Team, Worker, to_command_line
from tests.netlab.lab.laboratory import Laboratory, Link

CONTEXT, MICROBATCH, BYTES_PER_VALUE = 64, 4, 2
MICROBATCH_TOKENS = CONTEXT * MICROBATCH
ENDLESS_STEP = 2**16  # microbatches; no step ends within a measurement
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Setting:
    """A pipeline. `rates`: microbatches a second of the peers of each stage; `owners`: peers that begin microbatches.

    `step`: microbatches that a peer takes in before it waits for all of their gradients.
    """

    rates: tuple[tuple[float, ...], ...]
    owners: int
    in_flight: int
    activation_bytes: int
    step: int = ENDLESS_STEP

    @property
    def ideal(self) -> float:
        """Return the microbatches a second of the weakest stage."""
        return min(sum(rates) for rates in self.rates)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the run; only sizes and the pipeline matter."""
        width = self.activation_bytes // (CONTEXT * MICROBATCH * BYTES_PER_VALUE)
        return {
            "run": {"name": "test"},
            "model": {
                "width": width,
                "layers": len(self.rates),
                "heads": 1,
                "hidden": width,
                "context": CONTEXT,
                "tied": False,
            },
            "data": {"source": "python-stdlib"},
            "train": {"batch_tokens": self.step * MICROBATCH_TOKENS, "learning_rate": 1e-3},
            "method": {"recipe": "frugal"},
            "pipeline": {"stages": len(self.rates), "microbatch": MICROBATCH, "in_flight": self.in_flight},
        }


@dataclass(frozen=True)
class Window:
    """The work of a swarm in `seconds`.

    Args:
        computed: forward and backward passes of each peer.
        fetched: bytes that each peer downloaded.
        direct_share: of the bytes of downloads, by direct connections.
        cpu_seconds: of all peers, with their p2pd.
        p2pd_share: of these, by p2pd.
    """

    seconds: float
    done: int
    dropped: int
    steps: int
    computed: tuple[int, ...]
    answers: Counter[str]
    bytes_sent: int
    fetched: tuple[int, ...]
    direct_share: float
    cpu_seconds: float
    p2pd_share: float

    @property
    def rate(self) -> float:
        """Return microbatches a second."""
        return self.done / self.seconds

    def per_microbatch(self, amount: float) -> float:
        return amount / max(1, self.done)


class Swarm:
    """One process for each peer. The first `owners` peers own microbatches.

    `laboratory` gives each peer a machine of its own behind `link`; without one all are on this machine.
    """

    def __init__(self, setting: Setting, laboratory: Laboratory | None = None, link: Link | None = None) -> None:
        self.setting = setting
        places = [(stage, rate) for rank in range(len(setting.rates[0])) for stage, rate in self._column(rank)]
        self.places = tuple(places)
        self._laboratory, self._link = laboratory, link
        self.team = Team([self._start_worker(rank, stage, rate) for rank, (stage, rate) in enumerate(places)])

    def _start_worker(self, rank: int, stage: int, rate: float) -> Worker:
        words = {"manifest": json.dumps(self.setting.manifest()), "stage": stage, "rate": rate}
        words |= {"owns": int(rank < self.setting.owners)}
        laboratory = self._laboratory
        node = laboratory.ordinary_node(self._link or Link()) if laboratory is not None else None
        with laboratory.inside(node) if laboratory is not None and node is not None else nullcontext():
            address = {"address": node.address} if node is not None else {}
            return Worker("benchmarks.pipelining.peer", to_command_line(words | address))

    def _column(self, rank: int) -> list[tuple[int, float]]:
        return [(stage, rates[rank]) for stage, rates in enumerate(self.setting.rates)]

    def __enter__(self) -> Self:
        try:
            self.team.introduce()
            self._wait_until_all_live()
        except BaseException:
            self.team.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.team.stop()

    def _wait_until_all_live(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while any(answer["live"] < len(self.places) for answer in self.team.request_all(live=True)):
            if time.monotonic() > deadline:
                raise SilentError("the peers do not find one another")
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Let all trainers be ready."""
        self.team.request_all(start=True)

    def slow_down(self, rank: int, rate: float) -> None:
        """Change the speed of one peer's trainer."""
        self.team.workers[rank].request(rate=rate)

    def idle_cpu(self, seconds: float) -> float:
        """Return the processor seconds a second of all peers before they begin."""
        before = self.team.processor_seconds()
        time.sleep(seconds)
        return (self.team.processor_seconds() - before) / seconds

    def start_watch(self) -> None:
        """Begin a window in which all peers measure delays of their event loops and small calls."""
        self.team.request_all(watch=True)

    def watched(self) -> list[dict[str, float]]:
        """Return the delays of each peer since then."""
        return self.team.request_all(watched=True)

    def measure(self, seconds: float) -> Window:
        """Wait, and return what happened meanwhile."""
        before, cpu = self.team.request_all(counts=True), self.team.processor_seconds()
        time.sleep(seconds)
        after, cpu_after = self.team.request_all(counts=True), self.team.processor_seconds()
        return _difference(before, after, cpu_after - cpu)


def _difference(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], cpu_seconds: float) -> Window:
    def total(name: str) -> Any:
        return sum(new[name] - old[name] for old, new in zip(before, after, strict=True))

    answers = sum((Counter(new["answers"]) for new in after), Counter[str]())
    answers.subtract(sum((Counter(old["answers"]) for old in before), Counter[str]()))
    paths = sum((Counter(new["fetched_by_path"]) for new in after), Counter[str]())
    paths.subtract(sum((Counter(old["fetched_by_path"]) for old in before), Counter[str]()))
    dropped = [sum(sum(reading["dropped"].values()) for reading in readings) for readings in (before, after)]
    return Window(
        seconds=after[0]["time"] - before[0]["time"],
        done=total("done"),
        dropped=dropped[1] - dropped[0],
        steps=total("steps"),
        computed=tuple(new["computed"] - old["computed"] for old, new in zip(before, after, strict=True)),
        answers=answers,
        bytes_sent=total("sent"),
        fetched=tuple(new["fetched"] - old["fetched"] for old, new in zip(before, after, strict=True)),
        direct_share=paths["direct"] / max(1, paths.total()),
        cpu_seconds=cpu_seconds,
        p2pd_share=1 - total("cpu") / cpu_seconds,
    )

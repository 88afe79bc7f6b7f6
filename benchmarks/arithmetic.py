"""Measure the arithmetic of one peer in a merge among four: the seconds that `sync.py` cannot go below.

    python benchmarks/arithmetic.py [--numel 25000000] [--turns 7] [--only RECIPE ...] [--json]

One process and one thread does what a node does, function by function: encode a message, name what is sent and what
has come (BLAKE3), check what has come, sum (of a butterfly every fourth part), the outer update, and name the new
state. `seal` is AES-128-GCM on what goes out and comes in, in records of 16 KiB as TLS cuts it. Rounds, calls, the
kernel and the disk are left out. Each figure is the median of processor milliseconds over the turns; the messages are
those of `sync.py`. `all`: of one peer, but for the name of the state, which no trainer waits for.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.merge.random_vectors import random_vector, relative_error
from node.daemon.state.outer_state import OuterState
from optim.codecs.base import Payload
from optim.compose import compose
from optim.exchange import Aggregator, ContributionEncoder
from optim.kernels.vectors import Vector
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.manifest.sections import RoundSection

PEERS = 4
RECIPES = ("averaging", "sparseloco", "frugal")
WEIGHTS = [1.0] * PEERS
RECORD_BYTES = 1 << 14
STATE = "name the state"


@dataclass
class Ledger:
    """Processor milliseconds of this thread by what they went into, in one merge."""

    spent: dict[str, float] = field(default_factory=dict)

    def of(self, what: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = work()
        self.spent[what] = self.spent.get(what, 0.0) + 1000 * (time.thread_time() - began)
        return result


class Merge:
    """Round 0, seen by the first of four peers."""

    def __init__(self, recipe: str, numel: int) -> None:
        self._program = RoundPlanner(compose(recipe, {}), Layout(((numel,),)), RoundSection().parts)
        self._plan = self._program.plan(0)
        self._merger = Aggregator(self._program)
        self._delta = random_vector(0, numel)
        self._before = self._after = OuterState.initial(random_vector(PEERS, numel), self._program.method)
        self._messages = [self._encoded(random_vector(rank, numel)) for rank in range(PEERS)]

    def run(self) -> dict[str, float]:
        ledger = Ledger()
        residual = torch.zeros(self._program.numel)
        own = ledger.of("encode", lambda: ContributionEncoder(self._program).encode(0, self._delta, residual))
        ledger.of("name", lambda: [Blob.of(payload) for payload in own])
        exchange = self._summed if self._plan.method.topology.reduces_parts else self._gathered
        payloads = exchange(ledger, own)
        self._after = ledger.of("update", lambda: self._moved(payloads))
        ledger.of(STATE, lambda: Blob.of(*self._after.byte_views()))
        return ledger.spent

    def error(self) -> float:
        """Of what the last run came to, relative to the mean of all deltas."""
        return relative_error(self._before.anchor - self._after.anchor, PEERS)

    def _gathered(self, ledger: Ledger, own: Sequence[Payload]) -> list[Vector]:
        """Everybody's whole message is sent to everybody."""
        come = [message[0] for message in self._messages[1:]]
        _passed(ledger, [own[0]] * len(come), come)
        read: list[Vector] = ledger.of(
            "check", lambda: [self._merger.decode_part(0, one, 0) for one in [own[0], *come]]
        )
        return read

    def _summed(self, ledger: Ledger, own: Sequence[Payload]) -> list[Payload]:
        """Every fourth part is summed here; of the others the sums come."""
        mine = range(0, len(own), PEERS)
        others = [part for part in range(len(own)) if part not in mine]
        come = {part: [message[part] for message in self._messages[1:]] for part in mine}
        _passed(ledger, [own[part] for part in others], [payload for part in mine for payload in come[part]])
        ledger.of("check", lambda: [self._merger.decode_part(0, one, part) for part in mine for one in come[part]])
        reduced = ledger.of("sum", lambda: {part: self._reduced(part, [own[part], *come[part]]) for part in mine})
        ledger.of("name", lambda: [Blob.of(payload) for payload in reduced.values()])
        sums = [self._reduced(part, [message[part] for message in self._messages]) for part in others]
        _passed(ledger, list(reduced.values()) * (PEERS - 1), sums)
        ledger.of(
            "check", lambda: [self._merger.decode_part(0, one, part) for part, one in zip(others, sums, strict=True)]
        )
        whole = reduced | dict(zip(others, sums, strict=True))
        return [whole[part] for part in range(len(own))]

    def _encoded(self, delta: torch.Tensor) -> list[Payload]:
        return ContributionEncoder(self._program).encode(0, delta, torch.zeros(self._program.numel))

    def _reduced(self, part: int, payloads: Sequence[Payload]) -> Payload:
        return self._merger.reduce_part(0, part, payloads, WEIGHTS).payload

    def _moved(self, payloads: Sequence[Payload | Vector]) -> OuterState:
        before = self._before
        merged = self._merger.merge(0, payloads, WEIGHTS, before.slots).vector
        return OuterState(
            *self._program.apply_outer_step(self._plan, before.anchor, before.slots, merged, 1.0, WEIGHTS)
        )


def _passed(ledger: Ledger, sent: Sequence[Payload], come: Sequence[Payload]) -> None:
    """Each is sealed by who sends it and opened by who gets it, who then asks for its name."""
    cipher, nonce = AESGCM(bytes(16)), bytes(12)
    sealed = [[cipher.encrypt(nonce, record, None) for record in _records(payload)] for payload in come]
    ledger.of("seal", lambda: [cipher.encrypt(nonce, record, None) for one in sent for record in _records(one)])
    ledger.of("seal", lambda: [cipher.decrypt(nonce, record, None) for one in sealed for record in one])
    ledger.of("name", lambda: [Blob.of(payload) for payload in come])


def _records(payload: Payload) -> list[memoryview]:
    whole = memoryview(payload)
    return [whole[start : start + RECORD_BYTES] for start in range(0, len(whole), RECORD_BYTES)]


@dataclass(frozen=True)
class Cost:
    """Processor milliseconds of one peer. `least_seconds`: of four that share so many cores."""

    parts: Mapping[str, float]
    all: float
    cores: int

    @property
    def least_seconds(self) -> float:
        return self.all * PEERS / self.cores / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = {recipe: measure(recipe, options.numel, options.turns) for recipe in options.only}
    found = {name: asdict(cost) | {"least_seconds": cost.least_seconds} for name, cost in costs.items()}
    print(json.dumps(found) if options.json else table(costs))
    return 0


def measure(recipe: str, numel: int, turns: int) -> Cost:
    """The first turn is not counted."""
    merge = Merge(recipe, numel)
    return cost_of([merge.run() for _ in range(turns + 1)][1:], os.cpu_count() or 1)


def cost_of(runs: Sequence[Mapping[str, float]], cores: int) -> Cost:
    parts = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
    return Cost(parts, sum(spent for what, spent in parts.items() if what != STATE), cores)


def table(costs: Mapping[str, Cost]) -> str:
    names = list(dict.fromkeys(what for cost in costs.values() for what in cost.parts))
    lines = [f"| ms | {' | '.join(names)} | all | four peers on these cores, s |", "|---" * (len(names) + 3) + "|"]
    for recipe, cost in costs.items():
        cells = [f"{cost.parts[what]:.0f}" if what in cost.parts else "" for what in names]
        lines.append(f"| {recipe} | {' | '.join(cells)} | {cost.all:.0f} | {cost.least_seconds:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""How much of a real link is used: a merge, a newcomer's download, and training, on limited links between namespaces.

    python benchmarks/links.py [--settings 100 20] [--numel 25000000] [--turns 3] [--rest 0] [--rounds 12]
        [--only merge download hivemind sparse gloo compute lossy] [--json]

Four peers, each behind a link of 100 Mbit/s, or of 20 Mbit/s with 80 ms round trip. By setting:

    merge_line_share       payload bits of one dense fp16 merge, which an all-reduce has to send, over (nominal rate x
                           time from the order to the last peer's new anchor: encoding, decoding and the outer update
                           are in it). Two peers sum each part and others check parts, so a peer sends 1.5 times the
                           payload, and no more than two thirds of the line can go into this share
    merge_wire_ratio       bytes that left the peers' interfaces in all turns over that payload: 1.5 by that arithmetic
                           (`traffic_ratio`), and heads of packets, acknowledgements, what was sent twice (one plain
                           connection: x 1.046), less what is squeezed out of pieces of numbers on slow lines
    trusted_line_share     merge_line_share and merge_wire_ratio among peers that trust one another: one of them sums
    trusted_wire_ratio     each part, and nobody checks it, so a peer sends the payload once
    hivemind_line_share    the same for hivemind's averager in fp16, from the trigger on; 0: three times it found no
                           group, or lost members
    sparse_times_faster    seconds of hivemind's averager at 8 bit over those of a merge by the recipe frugal
    download_line_share    bits of a state (fp32) over (nominal rate x time), from three holders, checked and read
    compute_share          of the trainers' seconds those at the model, training and measuring it, in real peers that
                           train configs/demo.toml by its recipe as it is (the demo's peers wait for each round, since
                           they share a machine; these train on)
    gloo_compute_share     the same model and batches, its fp32 gradients summed by gloo in every step
    lossy_mbit             Mbit/s of a download from one holder: 100 Mbit/s, 50 ms, 0.5 % loss each way, cubic

Goodput of one plain connection is 0.956 of the rate. Congestion control is cubic everywhere, as on most machines. Needs
root, iproute2, nftables and iptables. Takes about 5 minutes for setting 100 and 15 for 20. Exit code 1 where a merge of
peers that trust one another or a download uses less than 0.88 (0.82 at 20), or another merge less than that over 1.5.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.merge.worker import SilentError, Team, Worker, to_command_line
from node.monitoring.status import COMPUTE_ACTIVITIES, NodeStatus, sum_seconds
from protocol.manifest.reading import load_manifest
from protocol.manifest.sections import RoundSection
from tests.netlab.lab.lab_swarm import running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link, Node
from tests.netlab.lab.namespaces import reason_unavailable

PEERS = 4
GLOO_PORT = 29_641
DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
SETTINGS: Final[Mapping[str, Link]] = MappingProxyType(
    {"100": Link(up=100, down=100), "20": Link(up=20, down=20, delay=0.04)}
)
LOSSY = Link(up=100, down=100, delay=0.025, loss=0.005)
TARGETS: Final[Mapping[str, float]] = MappingProxyType({"100": 0.88, "20": 0.82})
HALF_BYTES, FLOAT_BYTES = 2, 4
FEW_VALUES = 64  # of an outer state beside the weights, such as the usual norm of a contribution
REDUCERS = 2  # of each part, among peers that do not trust one another
PARTS: Final = RoundSection().parts
MEASURES = ("merge", "download", "hivemind", "sparse", "gloo", "compute", "lossy")
PARALLEL_STEPS = 8
ATTEMPTS = 3
RUN_SECONDS = 1200.0
Figures = dict[str, float]


@dataclass(frozen=True)
class Place:
    """Four machines of a laboratory, and the rate of their links in Mbit/s."""

    laboratory: Laboratory
    nodes: Sequence[Node]
    rate: float

    @classmethod
    def built(cls, laboratory: Laboratory, link: Link, peers: int) -> "Place":
        return cls(laboratory, [laboratory.ordinary_node(link) for _ in range(peers)], link.up)

    def share(self, size: float, seconds: float) -> float:
        """Of the line, for so many bytes."""
        return 8 * size / (self.rate * 1e6 * seconds)

    def sent(self) -> int:
        """Bytes that have left all of them so far, heads of packets among them."""
        return sum(self.laboratory.interface_bytes(node)[0] for node in self.nodes)

    @contextmanager
    def team(self, module: str, **options: object) -> Iterator[Team]:
        """A peer in each; they know one another."""
        workers = []
        for rank, node in enumerate(self.nodes):
            words = {"rank": rank, "peers": len(self.nodes), "address": node.address, **options}
            with self.laboratory.inside(node):
                workers.append(Worker(module, to_command_line(words)))
        with Team(workers) as team:
            team.introduce()
            yield team


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each dense merge, as between rounds")
    parser.add_argument("--rounds", type=int, default=12, help="of the demo's run")
    parser.add_argument("--only", nargs="*", default=MEASURES, choices=MEASURES)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    reason = reason_unavailable()
    if reason is not None:
        parser.error(reason)
    figures = {name: measure(name, words) for name in words.settings}
    lossy = lossy_mbit(words.numel) if "lossy" in words.only else None
    print(json.dumps({**figures, "lossy_mbit": lossy}) if words.json else table(figures, lossy))
    return int(not all(reached(figures)))


def measure(name: str, words: argparse.Namespace) -> Figures:
    figures: Figures = {}
    with Laboratory() as laboratory:
        place = Place.built(laboratory, SETTINGS[name], PEERS)
        if {"merge", "download"} & set(words.only):
            with dense_team(place, words.numel, REDUCERS) as team:
                # The download is of what a merge came to.
                share, ratio = merged(place, team, words.numel, words.turns, words.rest)
                note(figures, name, "merge_line_share", share)
                note(figures, name, "merge_wire_ratio", ratio)
                if "download" in words.only:
                    note(figures, name, "download_line_share", download_share(place, team, words.numel, words.turns))
        if "merge" in words.only:
            with dense_team(place, words.numel, reducers=1) as team:
                share, ratio = merged(place, team, words.numel, words.turns, words.rest)
                note(figures, name, "trusted_line_share", share)
                note(figures, name, "trusted_wire_ratio", ratio)
        if "hivemind" in words.only:
            seconds = hivemind_seconds(place, words.numel, words.turns, "fp16")
            note(figures, name, "hivemind_line_share", place.share(payload_of(words.numel), seconds))
        if "sparse" in words.only:
            note(figures, name, "sparse_times_faster", times_faster(place, words.numel, words.turns))
        if "gloo" in words.only:
            note(figures, name, "gloo_compute_share", gloo_share(place))
        if "compute" in words.only:
            share, wait = demo_share(place, words.rounds)
            note(figures, name, "compute_share", share)
            note(figures, name, "start_wait", wait)
    return figures


def dense_team(place: Place, numel: int, reducers: int) -> AbstractContextManager[Team]:
    """Peers that merge in fp16, and so many of which sum each part."""
    module = "benchmarks.merge.murmuration_peer"
    return place.team(module, numel=numel, recipe="averaging", codec="fp16", reducers=reducers)


def merged(place: Place, team: Team, numel: int, turns: int, rest: float = 0.0) -> tuple[float, float]:
    """Share of the line, and bytes on the wire over the payload."""
    payload, before = payload_of(numel), place.sent()
    seconds = merge_seconds(team, turns, rest)
    return place.share(payload, seconds), (place.sent() - before) / (PEERS * (turns + 1) * payload)


def gloo_share(place: Place) -> float:
    options = {"manifest": DEMO, "steps": PARALLEL_STEPS, "device": "eth0", "port": GLOO_PORT}
    with place.team("benchmarks.merge.data_parallel_peer", **options) as team:
        return statistics.fmean(answer["compute_share"] for answer in team.request_all(RUN_SECONDS, go=True))


def note(figures: Figures, setting: str, name: str, value: float) -> None:
    figures[name] = value
    print(f"  {setting} Mbit/s: {name} {value:.3f}", file=sys.stderr)


def times_faster(place: Place, numel: int, turns: int) -> float:
    theirs = hivemind_seconds(place, numel, turns, "8bit")
    with place.team("benchmarks.merge.murmuration_peer", numel=numel, recipe="frugal") as team:
        return theirs / merge_seconds(team, turns)


def hivemind_seconds(place: Place, numel: int, turns: int, compression: str) -> float:
    """Infinite where it fails again and again."""
    for _ in range(ATTEMPTS):
        try:
            with place.team("benchmarks.merge.hivemind_peer", numel=numel, compression=compression) as team:
                return merge_seconds(team, turns)
        except SilentError as error:
            print(f"  hivemind is started again: {error}", file=sys.stderr)
    return math.inf


def payload_of(numel: int) -> float:
    """Bytes that a peer sends in a merge of halves in which each part has one reducer, as in any all-reduce."""
    return 2 * (PEERS - 1) / PEERS * HALF_BYTES * numel


def traffic_ratio(reducers: int) -> float:
    """Bytes of contributions and sums that a peer sends on average, in payloads.

    Each of a part's reducers gets it from all others; who is none of them gets the sum. Each peer also gets the inputs
    of one part that it does not reduce, of all others, and checks its sum, unless the part has one reducer.
    """
    contributions, sums = reducers * (PEERS - 1) / PEERS, (PEERS - reducers) / PEERS
    checks = (PEERS - 1) / PARTS if reducers > 1 else 0.0
    return (contributions + sums + checks) / (2 * (PEERS - 1) / PEERS)


def merge_seconds(team: Team, turns: int, rest: float = 0.0) -> float:
    """The median of the turns after the first."""
    seconds = []
    for _ in range(turns + 1):
        time.sleep(rest)
        team.request_all(prepare=True)
        seconds.append(team.merge(RUN_SECONDS))
    return statistics.median(seconds[1:])


def download_share(place: Place, team: Team, numel: int, turns: int) -> float:
    """To each of the first peers in turn, from all others."""
    seconds = []
    for worker in team.workers[:turns]:
        begun = time.monotonic()
        size = worker.request(RUN_SECONDS, download=True)["bytes"]
        seconds.append(time.monotonic() - begun)
    assert FLOAT_BYTES * numel <= size < FLOAT_BYTES * (numel + FEW_VALUES), size
    return place.share(size, statistics.median(seconds))


def demo_share(place: Place, rounds: int) -> tuple[float, float]:
    """Return the share of computing since the first round, and the seconds of waiting before."""
    manifest = load_manifest(DEMO)
    target, run = manifest.target, manifest.run
    changed = manifest.model_copy(
        update={
            "target": target.model_copy(update={"rounds": rounds}),
            "run": run.model_copy(update={"min_peers": PEERS}),
            "method": manifest.method.model_copy(update={"schedule": {}}),
        }
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp"))
        swarm = stack.enter_context(running_lab_swarm(Path(folder), changed, place.laboratory, place.nodes))
        swarm.start()
        swarm.wait_until(lambda: have_applied(swarm.poll(), 1), "all have applied the first round", RUN_SECONDS)
        steps = [status.step for status in swarm.poll()]
        swarm.wait_until(lambda: have_passed(swarm.poll(), steps), "all trainers have reported since", RUN_SECONDS)
        begun = [peer.totals.newest_seconds() for peer in swarm.peers]
        swarm.wait_until(
            lambda: bool(swarm.poll()) and not any(p.is_running for p in swarm.peers), "all end", RUN_SECONDS
        )
        swarm.poll()
        since = [passed(then, peer.totals.newest_seconds()) for then, peer in zip(begun, swarm.peers, strict=True)]
        print(f"  seconds by activity since the first round: {since}", file=sys.stderr)
        computing = sum(sum_seconds(seconds, *COMPUTE_ACTIVITIES) for seconds in since)
        waits = statistics.fmean(seconds.get("wait", 0.0) for seconds in begun)
        return computing / sum(sum(seconds.values()) for seconds in since), waits


def have_applied(statuses: Sequence[NodeStatus], number: int) -> bool:
    """Return whether all peers have applied so many rounds."""
    return len(statuses) == PEERS and all(status.round >= number for status in statuses)


def have_passed(statuses: Sequence[NodeStatus], steps: Sequence[int]) -> bool:
    """Return whether the trainers have reported more steps than these, after which they may have waited."""
    return all(status.step > step for status, step in zip(statuses, steps, strict=True))


def passed(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by activity that have passed between two reports."""
    return {activity: seconds - before.get(activity, 0.0) for activity, seconds in now.items()}


def lossy_mbit(numel: int) -> float:
    """Between two peers."""
    with Laboratory() as laboratory:
        place = Place.built(laboratory, LOSSY, 2)
        with place.team("benchmarks.merge.murmuration_peer", numel=numel, recipe="averaging") as team:
            return LOSSY.up * download_share(place, team, numel, 2)


def reached(figures: Mapping[str, Figures]) -> list[bool]:
    times = {"merge_line_share": traffic_ratio(REDUCERS), "trusted_line_share": 1.0, "download_line_share": 1.0}
    return [
        times[share] * figures[name][share] >= TARGETS[name]
        for name in figures
        for share in times
        if share in figures[name]
    ]


def table(figures: Mapping[str, Figures], lossy: float | None) -> str:
    rows = ["| | " + " | ".join(f"{name} Mbit/s" for name in figures) + " |", "|---" * (len(figures) + 1) + "|"]
    for share in next(iter(figures.values()), {}):
        rows.append(f"| {share.replace('_', ' ')} | " + " | ".join(f"{f[share]:.2f}" for f in figures.values()) + " |")
    if lossy is not None:
        rows += ["", f"with 50 ms and 0.5 % loss: {lossy:.0f} of 100 Mbit/s"]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

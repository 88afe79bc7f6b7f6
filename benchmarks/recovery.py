"""Measure how long a newcomer, and a peer that was killed, take until a round has their work, by the size of the state.

    python benchmarks/recovery.py [--millions 25] [--rate 100] [--json]

Three real peers behind links of `--rate` Mbit/s train a model of that many million parameters, in rounds of 20 s whose
steps are played (`tests/swarm/peers/paced_trainer.py`). A fourth joins with an empty folder; when it contributes it is
killed, and comes back in its folder after one round without it. Prints, for both, the seconds from the start of the
process until its node is on the network, its state is there, its trainer has made a step, and a commit has its work;
`allowed` is the size of the state over the rate, 20 s, and a round, because a contribution waits for the end of one.

Takes 5 minutes for 25 million on two cores, and 1.5 GB a peer. Needs root, iproute2, nftables and iptables. Exit code 1
where one of them takes longer than allowed.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from node.model import shape_table
from protocol.manifest.run import Manifest
from tests.netlab.lab.lab_swarm import LabPeer, LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.netlab.lab.namespaces import reason_unavailable
from tests.swarm.peers.paced_trainer import PLAYED
from tests.swarm.process_swarm import ENDLESS, manifest_with

PEERS = 3
STEP_SECONDS = 2.0
ROUND_SECONDS = 20.0
LAYERS, HEAD_WIDTH = 8, 64
SPARE_SECONDS = 20.0
FLOAT_BYTES = 4
DELAY = 0.02
RUN_SECONDS = 420.0
POLL_SECONDS = 0.2
Steps = dict[str, float]


def make_manifest(millions: float) -> Manifest:
    """A decoder of about so many million parameters; a step takes a CPU less than it plays."""
    heads = max(1, round(math.sqrt(millions * 1e6 / (12 * LAYERS)) / HEAD_WIDTH))
    width, steps = heads * HEAD_WIDTH, round(ROUND_SECONDS / STEP_SECONDS)
    return manifest_with(
        run={"min_peers": PEERS},
        model={"width": width, "layers": LAYERS, "heads": heads, "hidden": 8 * width // 3, "context": 32},
        train={"batch_tokens": 32, "microbatch": 1, "warmup_steps": 20},
        method={"recipe": "frugal", "schedule": {"inner_steps": steps, "ahead": steps, "seconds": ROUND_SECONDS}},
        round={"grace": 10.0, "leader_timeout": 5.0, "exchange_timeout": 60.0},
        membership={"heartbeat": 2.0, "expiry": 15.0},
        target={"rounds": ENDLESS},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--millions", type=float, default=25.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    if (reason := reason_unavailable()) is not None:
        parser.error(reason)
    manifest = make_manifest(words.millions)
    state_bytes = FLOAT_BYTES * shape_table(manifest.model).numel
    allowed = 8 * state_bytes / (words.rate * 1e6) + SPARE_SECONDS + ROUND_SECONDS
    found = measure(manifest, words.rate)
    report = {"parameters": state_bytes // FLOAT_BYTES, "rate": words.rate, "allowed": round(allowed, 1), **found}
    print(json.dumps(report) if words.json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    return int(any(steps["contributing"] > allowed for steps in found.values()))


def measure(manifest: Manifest, rate: float) -> dict[str, Steps]:
    os.environ[PLAYED] = str(STEP_SECONDS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp")))
        laboratory = stack.enter_context(Laboratory())
        nodes = [laboratory.node(Link(up=rate, down=rate, delay=DELAY)) for _ in range(PEERS + 1)]
        swarm = stack.enter_context(running_lab_swarm(folder, manifest, laboratory, nodes))
        for peer in swarm.lab_peers:
            peer.replace_module("tests.swarm.peers.paced_peer")
        *first, newcomer = swarm.lab_peers
        first[0].start(())
        swarm.wait_until(lambda: bool(first[0].addresses()), "the first peer has an address")
        introducer = first[0].public_addresses()[:1]
        for peer in first[1:]:
            peer.start(introducer)
        swarm.wait_until(lambda: round_of(swarm, first) >= 2, "two rounds", RUN_SECONDS)
        joined = follow(swarm, newcomer, introducer)
        newcomer.kill()
        missed = round_of(swarm, first) + 2
        swarm.wait_until(lambda: round_of(swarm, first) >= missed, "a round without it", RUN_SECONDS)
        returned = follow(swarm, newcomer, introducer)
    return {"newcomer": joined, "comes back": returned}


def round_of(swarm: LabSwarm, peers: list[LabPeer]) -> int:
    return max((status.round for status in swarm.poll(*peers)), default=0)


def follow(swarm: LabSwarm, peer: LabPeer, introducer: tuple[str, ...]) -> Steps:
    """Start the peer; return the seconds until each step."""
    began = time.monotonic()
    peer.start(introducer)
    steps: Steps = {}

    def until(name: str, reached: Callable[[], bool]) -> None:
        swarm.wait_until(lambda: bool(swarm.poll(peer)) and reached(), name, RUN_SECONDS)
        steps[name] = round(time.monotonic() - began, 1)
        print(f"{peer.name}: {name} after {steps[name]} s", file=sys.stderr)

    def status_round() -> int:
        return peer.status.round if peer.status is not None else 0

    until("on the network", lambda: peer.status is not None)
    others = [other for other in swarm.lab_peers if other is not peer]
    head = round_of(swarm, others)
    until("has the state", lambda: status_round() >= head)
    before = peer.status.step if peer.status is not None else 0
    until("trains", lambda: peer.status is not None and peer.status.step > before)
    until("contributing", lambda: peer.status is not None and peer.status.contributions_included > 0)
    return steps


if __name__ == "__main__":
    sys.exit(main())

"""The control traffic of one peer and round: encoded bytes by kind of message, among few and many peers.

    python benchmarks/crowd.py [--real 3 12 20] [--virtual 20 200 2000] [--rounds 10] [--json]

Real peers are processes of the smallest run (configs/test.toml, with the default heartbeat): dense messages in 12
parts, each summed by two reducers. Virtual peers exchange one sparse message each in a round of 10 s: real round
machines under a virtual clock, whose messages have their real encoding, and a model of gossip with real sizes.

A figure is what a peer sends, which is on average what a peer receives: every byte is counted once. `wire`: the
transport's count for the same messages, with framing and encryption; `leader`: what the peer sends that sends the most.
Blobs are in none of them. 2,000 virtual peers take half an hour on a core.

Exit code 1 where a peer sends more than 2 KB for each peer of the swarm: 40 KB among 20, 400 KB among 200.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict

from benchmarks.crowding import real_swarm, virtual_gossip
from benchmarks.crowding.real_swarm import Cost
from benchmarks.crowding.virtual_round import VirtualRound

LIMIT_BYTES = 2000  # for each peer of the swarm
LIMITED_FROM = 20  # peers; among few, the fixed part counts
VIRTUAL_ROUND_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", nargs="*", type=int, default=[3, 12, 20])
    parser.add_argument("--virtual", nargs="*", type=int, default=[20, 200, 2000])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = {f"{peers} virtual": measure_virtual(peers) for peers in options.virtual}
    costs |= {f"{peers} real": real_swarm.measure(peers, options.rounds) for peers in options.real}
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}) if options.json else table(costs))
    return int(any(exceeds(name, cost) for name, cost in costs.items()))


def measure_virtual(peers: int) -> Cost:
    """Return the cost of one peer and round among virtual peers; their CPU time says nothing."""
    traffic = VirtualRound(peers).run()
    gossip, _ = virtual_gossip.measure(peers, 2, VIRTUAL_ROUND_SECONDS)
    sent = {**traffic.sent, "gossip": gossip}
    return Cost(sent, sent, 0.0, 0.0, 0.0, VIRTUAL_ROUND_SECONDS, traffic.most_sent)


def exceeds(name: str, cost: Cost) -> bool:
    """Return whether a peer sends more than it may."""
    peers = int(name.split()[0])
    return peers >= LIMITED_FROM and sum(cost.sent.values()) > LIMIT_BYTES * peers


def table(costs: Mapping[str, Cost]) -> str:
    """Return the bytes that a peer sends in a round, in KB, with a row for each kind."""
    kinds = sorted({kind for cost in costs.values() for kind in cost.sent})
    rows: list[tuple[str, list[float]]] = [
        (kind, [cost.sent.get(kind, 0.0) / 1e3 for cost in costs.values()]) for kind in kinds
    ]
    rows.append(("all, encoded", [sum(cost.sent.values()) / 1e3 for cost in costs.values()]))
    rows.append(("all, on the wire", [cost.wire / 1e3 for cost in costs.values()]))
    rows.append(("messages of the leader", [cost.leader / 1e3 for cost in costs.values()]))
    rows.append(("CPU-seconds, daemon and p2pd", [cost.cpu_seconds for cost in costs.values()]))
    rows.append(("seconds of a round", [cost.round_seconds for cost in costs.values()]))
    lines = [f"| KB a peer and round | {' | '.join(costs)} |", "|---" * (len(costs) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{v:.2f}' if v else '' for v in values)} |" for name, values in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

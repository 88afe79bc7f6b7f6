"""The control traffic of one peer and round: encoded bytes by kind of message, among few and many peers.

    python benchmarks/crowd.py [--real 3 12 20] [--rounds 10] [--json]

Real peers are processes of the smallest run (configs/test.toml, with the default heartbeat).

A figure is what a peer sends, which is on average what a peer receives: every byte is counted once. `wire` is the count
of the transport for the same messages, with framing and encryption; blobs are in none of them.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict

from benchmarks.crowding import real_swarm
from benchmarks.crowding.real_swarm import Cost


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", nargs="*", type=int, default=[3, 12, 20])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = {f"{peers} real": real_swarm.measure(peers, options.rounds) for peers in options.real}
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}) if options.json else table(costs))
    return 0


def table(costs: Mapping[str, Cost]) -> str:
    """Return the bytes that a peer sends in a round, in KB, with a row for each kind."""
    kinds = sorted({kind for cost in costs.values() for kind in cost.sent})
    rows: list[tuple[str, list[float]]] = [
        (kind, [cost.sent.get(kind, 0.0) / 1e3 for cost in costs.values()]) for kind in kinds
    ]
    rows.append(("all, encoded", [sum(cost.sent.values()) / 1e3 for cost in costs.values()]))
    rows.append(("all, on the wire", [cost.wire / 1e3 for cost in costs.values()]))
    rows.append(("CPU-seconds, daemon and p2pd", [cost.cpu_seconds for cost in costs.values()]))
    rows.append(("seconds of a round", [cost.round_seconds for cost in costs.values()]))
    lines = [f"| KB a peer and round | {' | '.join(costs)} |", "|---" * (len(costs) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |" for name, values in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""What a peer uploads: every recipe's encoded bytes a round and a step, against fp32 all-reduce of the gradients.

    python benchmarks/traffic.py [--peers 3] [--json]

Messages of the demo's model are encoded for real; how often each is sent follows from the topology:

    butterfly   every peer sends (N-1)/N of its message to the reducers and its reduced share to N-1 others
    gather      every message reaches N-1 others; on average a peer uploads as much as it downloads
    all-reduce  2(N-1)/N of the gradients, 4 bytes each, in every step
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TypedDict

import torch

from node.model import shape_table
from optim.method import Merger, Method, Sender
from optim.recipes import compose
from optim.rows import RECIPES
from protocol.manifest import load_manifest

MANIFEST = Path(__file__).parent.parent / "configs" / "demo.toml"


class Traffic(TypedDict):
    """Of one peer. Bytes uploaded."""

    inner_steps: int
    bits_per_parameter: float
    bytes_a_round: int
    bytes_a_step: float
    times_less: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    manifest = load_manifest(MANIFEST)
    numel, parts = shape_table(manifest.model).numel, manifest.round.parts
    rows = {name: traffic(compose(name), numel, parts, options.peers) for name in RECIPES}
    print(json.dumps(rows) if options.json else table(rows, numel, options.peers))
    return 0


def traffic(method: Method, numel: int, parts: int, peers: int) -> Traffic:
    delta = 1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    payloads = Sender(method, numel, parts).message(delta, torch.zeros(numel))
    message = sum(len(payload) for payload in payloads)
    if method.topology == "gather":
        uploaded = float(message * (peers - 1))
    else:
        bounds = Merger(method, numel, parts).bounds
        reduced = sum(method.codec.max_bytes(stop - start) for start, stop in bounds)
        uploaded = (message + reduced) * (peers - 1) / peers
    steps = method.schedule.inner_steps
    return Traffic(
        inner_steps=steps,
        bits_per_parameter=8 * message / numel,
        bytes_a_round=round(uploaded),
        bytes_a_step=uploaded / steps,
        times_less=all_reduce(numel, peers) * steps / uploaded,
    )


def all_reduce(numel: int, peers: int) -> float:
    """Bytes that one peer sends to average fp32 gradients once."""
    return 2 * (peers - 1) / peers * 4 * numel


def table(rows: dict[str, Traffic], numel: int, peers: int) -> str:
    lines = [
        f"{numel:,} parameters, {peers} peers; upload of one peer",
        "",
        "| recipe | inner steps a round | bits a parameter | kB a round | kB a step | times less than all-reduce |",
        "|---|---|---|---|---|---|",
        f"| all-reduce, fp32 | 1 | 32 | {all_reduce(numel, peers) / 1e3:,.0f} "
        f"| {all_reduce(numel, peers) / 1e3:,.0f} | 1 |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['inner_steps']} | {row['bits_per_parameter']:.2f} | {row['bytes_a_round'] / 1e3:,.0f} "
            f"| {row['bytes_a_step'] / 1e3:,.2f} | {row['times_less']:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

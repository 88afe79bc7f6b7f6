"""Compare a peer's uploads: every recipe's encoded bytes a round and a step, and an fp32 all-reduce of the gradients.

    python benchmarks/traffic.py [--peers 3] [--json]

Messages of the demo's model are encoded for real; how often each is sent follows from the topology:

    butterfly   every peer sends (N-1)/N of its message to the reducers and its reduced share to N-1 others
    gather      every message reaches N-1 others; on average a peer uploads as much as it downloads
    groups      every message reaches the others of its group
    all-reduce  2(N-1)/N of the gradients, 4 bytes each, in every step

A method in fragments or periods is measured until every value was sent; one that changes, once it no longer does.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TypedDict

import torch

from node.from_manifest import build_program
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.recipes import RECIPES
from optim.round_plan import RoundPlan, RoundPlanner
from protocol.manifest.reading import load_manifest

MANIFEST = Path(__file__).parent.parent / "configs" / "demo.toml"


class Traffic(TypedDict):
    """Of one peer. Bytes uploaded; a period: until every value was sent."""

    inner_steps: int
    bits_per_parameter: float
    bytes_a_period: int
    bytes_a_step: float
    times_less: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    manifest = load_manifest(MANIFEST)
    programs = {name: build_program(manifest, compose(name)) for name in RECIPES}
    rows = {name: traffic(program, options.peers) for name, program in programs.items()}
    print(json.dumps(rows) if options.json else table(rows, programs["diloco"].numel, options.peers))
    return 0


def traffic(program: RoundPlanner, peers: int) -> Traffic:
    delta = 1e-3 * torch.randn(program.signal_numel, generator=torch.Generator().manual_seed(0))
    sent, uploaded, steps = 0, 0.0, 0
    for number in program.cycle:
        plan = program.plan(number)
        payloads = ContributionEncoder(program).encode(number, delta, torch.zeros(program.signal_numel))
        size = sum(len(payload) for payload in payloads)
        sent, uploaded, steps = sent + size, uploaded + upload(plan, size, peers), steps + plan.steps
    return Traffic(
        inner_steps=steps,
        bits_per_parameter=8 * sent / program.numel,
        bytes_a_period=round(uploaded),
        bytes_a_step=uploaded / steps,
        times_less=all_reduce(program.numel, peers) * steps / uploaded,
    )


def upload(plan: RoundPlan, message: int, peers: int) -> float:
    """Bytes that one peer sends in a round whose message has so many."""
    topology = plan.method.topology
    if not topology.reduces_parts:
        return float(message * topology.partners(peers))
    return (message + sum(plan.max_sizes)) * (peers - 1) / peers


def all_reduce(numel: int, peers: int) -> float:
    """Bytes that one peer sends to average fp32 gradients once."""
    return 2 * (peers - 1) / peers * 4 * numel


def table(rows: dict[str, Traffic], numel: int, peers: int) -> str:
    lines = [
        f"{numel:,} parameters, {peers} peers; upload of one peer",
        "",
        "| recipe | inner steps a period | bits a parameter | kB a period | kB a step | times less than all-reduce |",
        "|---|---|---|---|---|---|",
        f"| all-reduce, fp32 | 1 | 32 | {all_reduce(numel, peers) / 1e3:,.0f} "
        f"| {all_reduce(numel, peers) / 1e3:,.0f} | 1 |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['inner_steps']} | {row['bits_per_parameter']:.2f} | {row['bytes_a_period'] / 1e3:,.0f} "
            f"| {row['bytes_a_step'] / 1e3:,.2f} | {row['times_less']:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

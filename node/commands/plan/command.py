"""`murmur plan`, and the line with which `murmur host` and `murmur join` warn of a layout that cannot pay."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from node.commands.plan.arithmetic import Workload, predict
from node.commands.plan.peers import load_peers, typical_peers
from node.commands.plan.report import POOR, factors, plan_values, print_plan
from node.commands.run_sizes import recorded_workload
from node.monitoring.tables import table_console
from node.own_loops import NO_CODE
from node.run_file import load_run_file
from protocol.errors import UsageError
from protocol.manifest.run import Manifest

logger = logging.getLogger(__name__)
REASONS = {
    "links": "activations take the links longer than computing takes",
    "stages": "the stages are unequal",
    "window": "too few or too many microbatches are on their way",
    "step": "steps are too short to fill the pipeline",
    "round": "rounds send too much for the time that they train",
}
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


def plan(run: str, peer_file: Path | None, insecure: bool, as_json: bool) -> None:
    """Print the prediction for a run. Raises MurmurError."""
    work = _recall(Path(run)) or _compute(run, insecure)
    kinds = load_peers(peer_file) if peer_file else typical_peers(work.manifest, work.parameters)
    found = predict(work, kinds)
    if as_json:
        sys.stdout.write(json.dumps(plan_values(work, kinds, found), indent=1) + "\n")
    else:
        print_plan(work, kinds, found, table_console())


def _recall(path: Path) -> Workload | None:
    """Return the recorded work of a run of `murmur init`, which takes no second; None for another."""
    return recorded_workload(load_run_file(path).manifest) if path.is_file() else None


def _compute(run: str, insecure: bool) -> Workload:
    from node.commands.capacity import workload_of  # loads torch
    from node.commands.join.invitation import open_or_recall
    from node.from_manifest import require_program

    invitation = open_or_recall(run, None, insecure)
    require_program(invitation.manifest, invitation.text)
    if invitation.manifest.model.is_custom:
        raise UsageError(NO_CODE)
    return workload_of(invitation.manifest)


def warn_if_poor(manifest: Manifest, listen: Sequence[str]) -> None:
    """Log one line if typical volunteers could use less than half of their compute.

    Peers that listen on loopback only are all on this machine, and have no links. How long a step of a model without
    code takes is not known.
    """
    if manifest.model.is_custom or all(address.startswith(LOOPBACK) for address in listen):
        return
    line = describe_if_poor(manifest)
    if line:
        logger.warning("%s", line)


def describe_if_poor(manifest: Manifest) -> str:
    """Return one line with the prediction for typical volunteers and its main reason; empty if they can do well."""
    from node.commands.capacity import workload_of  # loads torch

    work = workload_of(manifest)
    found = predict(work, typical_peers(manifest, work.parameters))
    if found.fraction >= POOR:
        return ""
    if not found.rate:
        return "the memory of typical volunteers does not hold this run's model; see `murmur plan RUN`"
    limits = factors(found)
    reason = REASONS[min(limits, key=lambda name: limits[name])]
    return (
        f"typical volunteers can use {found.fraction:.2f} of their compute in this run, mostly because {reason}; "
        "see `murmur plan RUN`"
    )

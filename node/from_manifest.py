"""From a manifest to what its method does with its model."""

import math
from collections.abc import Callable
from dataclasses import asdict

from node.model import shape_table
from optim.compose import compose
from optim.errors import OptimError
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import TOPOLOGIES, Topology, make_topology
from protocol.errors import ManifestError
from protocol.manifest import Manifest, TrainSection


def build_method(manifest: Manifest) -> Method:
    """Raises ManifestError for a recipe or an option that does not exist."""
    try:
        return compose(manifest.method.recipe, manifest.method.overrides())
    except OptimError as error:
        raise ManifestError(f"method: {error}") from error


def build_program(manifest: Manifest, method: Method | None = None) -> RoundPlanner:
    """`method`: another one than the manifest's. Raises ManifestError, also where the method does not fit the model."""
    method = method or build_method(manifest)
    try:
        program = RoundPlanner(method, shape_table(manifest.model).layout, manifest.round.parts)
        program.max_contribution_bytes  # noqa: B018  # lays out every kind of round
    except OptimError as error:
        raise ManifestError(f"method: {error}") from error
    return program


def topology_class(method: Method) -> type[Topology]:
    """Return the class of the exchange that the method's topology asks for."""
    return TOPOLOGIES[method.topology.kind]


def learning_rate_scale(train: TrainSection, step: int, age_at_join: int = 0) -> float:
    """Of the learning rate at inner step `step`, counted from 0: linear warm-up times cosine decay to `final_share`.

    `began`: local steps that the run was old when this trainer joined it. It warms up as everyone did, but to the rate
    that the others have by then.
    """
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return warmup
    cosine = (1 + math.cos(math.pi * min(1.0, (age_at_join + step) / train.decay_steps))) / 2
    return warmup * (train.final_share + (1 - train.final_share) * cosine)


def learning_rate_decay(train: TrainSection) -> Callable[[int], float]:
    return lambda step: learning_rate_scale(train, step)


def build_pacing(manifest: Manifest, program: RoundPlanner) -> Pacing:
    return Pacing(
        manifest.round.grace,
        lambda number: program.plan(number).steps,
        manifest.train.batch_tokens,
        lambda number: program.plan(number).is_overlapped,
    )


def round_settings_by_number(manifest: Manifest, program: RoundPlanner) -> Callable[[int], RoundSettings]:
    """Return a function that maps a round number to the settings of that round."""

    def settings(number: int) -> RoundSettings:
        plan, timing = program.plan(number), manifest.round
        topology = plan.method.topology
        return RoundSettings(
            make_topology(topology.kind, manifest.run_id, len(plan.part_spans), **asdict(topology)),
            timing.grace,
            timing.leader_timeout,
            timing.exchange_timeout,
            vote_memory=2 * manifest.membership.expiry,
            roster_quorum=plan.method.schedule.quorum,
        )

    return settings

"""From a manifest to what its method does with its model."""

import math
from collections.abc import Callable

from node.model.shapes import shape_table
from optim.errors import OptimError
from optim.method import Method
from optim.program import Program
from optim.recipes import compose
from optim.topologies import Groups
from protocol.errors import ManifestError
from protocol.manifest import Manifest, Train
from protocol.pacing import Pacing
from protocol.rounds.events import RoundSettings


def method_of(manifest: Manifest) -> Method:
    """Raises ManifestError for a recipe or an option that does not exist."""
    try:
        return compose(manifest.method.recipe, manifest.method.overrides())
    except OptimError as error:
        raise ManifestError(f"method: {error}") from error


def program_of(manifest: Manifest, method: Method | None = None) -> Program:
    """`method`: another one than the manifest's. Raises ManifestError, also where the method does not fit the model."""
    method = method or method_of(manifest)
    try:
        program = Program(method, shape_table(manifest.model).layout, manifest.round.parts)
        program.max_message_bytes  # noqa: B018  # lays out every kind of round
    except OptimError as error:
        raise ManifestError(f"method: {error}") from error
    return program


def rate_share(train: Train, step: int, began: int = 0) -> float:
    """Of the learning rate at inner step `step`, counted from 0: linear warm-up times cosine decay to `final_share`.

    `began`: local steps that the run was old when this trainer joined it. It warms up as everyone did, but to the rate
    that the others have by then.
    """
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return warmup
    cosine = (1 + math.cos(math.pi * min(1.0, (began + step) / train.decay_steps))) / 2
    return warmup * (train.final_share + (1 - train.final_share) * cosine)


def decay_of(train: Train) -> Callable[[int], float]:
    return lambda step: rate_share(train, step)


def pacing_of(manifest: Manifest, program: Program) -> Pacing:
    return Pacing(
        manifest.round.grace,
        lambda number: program.plan(number).steps,
        manifest.train.batch_tokens,
        lambda number: program.plan(number).overlaps,
    )


def round_settings(manifest: Manifest, program: Program) -> Callable[[int], RoundSettings]:
    """Of each round by its number."""

    def settings(number: int) -> RoundSettings:
        plan, timing = program.plan(number), manifest.round
        topology = plan.method.topology
        groups = topology if isinstance(topology, Groups) else Groups()
        return RoundSettings(
            manifest.run_id, topology.kind, len(plan.bounds), timing.grace, timing.leader_timeout,
            timing.exchange_timeout, 2 * manifest.membership.expiry, quorum=plan.method.schedule.quorum,
            group_size=groups.size, pattern=groups.pattern,
        )  # fmt: skip

    return settings

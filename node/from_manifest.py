"""Build the method, the round planner and the round settings of a manifest."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict

from node.loop.steering import Steering
from node.model import Cut, all_cuts, cut_of, shape_table
from optim.compose import COMPONENTS, compose
from optim.errors import OptimError, UnknownRecipe
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import TOPOLOGIES, Topology, make_topology
from protocol.errors import ManifestError
from protocol.fault_words import shorten
from protocol.manifest import Manifest, TrainSection
from protocol.manifest_faults import ManifestText

MAX_ERROR_CHARACTERS = 1000  # of a method's error, which may quote a long value and name all recipes
OPTION_IN_ERROR = re.compile(r"^(?P<part>\w+)(?:\.(?P<option>\w+)| '[^']*' has no option '(?P<unknown>\w+)')?")


def build_method(manifest: Manifest) -> Method:
    """Build the manifest's method. Raises ManifestError for an unknown recipe or option."""
    try:
        return compose(manifest.method.recipe, manifest.method.overrides())
    except OptimError as error:
        raise ManifestError(f"method: {shorten(str(error), MAX_ERROR_CHARACTERS)}", _keys_of(error)) from error


def build_program(manifest: Manifest, method: Method | None = None, cut: Cut | None = None) -> RoundPlanner:
    """Build the round planner for the manifest's method, or for `method`; `cut` names another stage than the manifest.

    Raises ManifestError, also if the method does not fit the model.
    """
    method = method or build_method(manifest)
    _require_fit(manifest, method)
    try:
        layout = shape_table(manifest.model, cut or cut_of(manifest)).layout
        program = RoundPlanner(method, layout, manifest.round.parts)
        program.max_contribution_bytes  # noqa: B018  # lays out every kind of round
    except OptimError as error:
        raise ManifestError(f"method: {shorten(str(error), MAX_ERROR_CHARACTERS)}", _keys_of(error)) from error
    return program


def _require_fit(manifest: Manifest, method: Method) -> None:
    """Raise ManifestError if audits or pipelines exclude the method or one another."""
    if manifest.audits.share and not topology_class(method).has_shared_state:
        reason = f"peers of topology {method.topology.kind!r} have anchors of their own, which no auditor has"
        raise ManifestError(f"audits.share: {reason}; set it to 0, or choose another topology", ("audits", "share"))
    if not manifest.pipeline.is_cut:
        return
    if not topology_class(method).has_shared_state:
        reason = (
            f"peers of topology {method.topology.kind!r} have anchors of their own, so a stage has no common weights"
        )
        raise ManifestError(
            f"pipeline.stages: {reason}; set it to 1, or choose another topology", ("pipeline", "stages")
        )
    if manifest.audits.share:
        reason = "a stage's contributions hold microbatches of other peers, which no auditor can repeat"
        raise ManifestError(f"audits.share: {reason}; set it to 0", ("audits", "share"))


def require_program(manifest: Manifest, text: ManifestText) -> RoundPlanner:
    """Build the round planner of the first stage; a ManifestError names the file, the key and its line."""
    try:
        first, *_ = [build_program(manifest, cut=cut) for cut in _telling_cuts(manifest.pipeline.stages)]
        return first
    except ManifestError as error:
        if not error.keys:
            raise
        message = str(error).removeprefix("method: ").removeprefix(f"{'.'.join(error.keys)}: ")
        named = next((keys for keys in _tables_around(error.keys) if text.has(keys)), error.keys)
        raise text.fault_at(named, message) from error


def _telling_cuts(stages: int) -> list[Cut]:
    """Return stages that a method fits only if it fits all: the first, the last, and the smallest between them."""
    cuts = all_cuts(stages)
    return list(dict.fromkeys((cuts[0], cuts[-2:][0], cuts[-1])))


def _keys_of(error: OptimError) -> tuple[str, ...]:
    """Return the path of the key that a method's error begins with, such as `codec.k = 0: ...`."""
    found = OPTION_IN_ERROR.match(str(error))
    if isinstance(error, UnknownRecipe):
        return ("method", "recipe")
    if not found or found["part"] not in COMPONENTS:
        return ("method",)
    return ("method", *filter(None, (found["part"], found["option"] or found["unknown"])))


def _tables_around(keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path and those of the tables around it; a default that does not fit has no line of its own."""
    yield from (keys[:length] for length in range(len(keys), 1, -1))
    yield keys[:1]


def topology_class(method: Method) -> type[Topology]:
    """Return the topology class of the method."""
    return TOPOLOGIES[method.topology.kind]


def learning_rate_scale(train: TrainSection, step: int, age_at_join: int = 0) -> float:
    """Return the factor of the learning rate at inner step `step` (from 0).

    The factor is a linear warm-up times a cosine decay to `final_share`. `age_at_join` is the run's age in inner steps
    when this trainer joined: it warms up like every trainer, but to the rate that the others have by then.
    """
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return warmup
    cosine = (1 + math.cos(math.pi * min(1.0, (age_at_join + step) / train.decay_steps))) / 2
    return warmup * (train.final_share + (1 - train.final_share) * cosine)


def rate_by_round(steering: Steering, program: RoundPlanner) -> Callable[[int], float]:
    """Return a function that maps a round number to the factor of the learning rate at its beginning."""
    return lambda number: learning_rate_scale(steering.manifest_at(number).train, program.steps_before(number))


def build_pacing(manifest: Manifest, program: RoundPlanner) -> Pacing:
    """Build the pacing of the rounds."""
    return Pacing(
        manifest.round.grace,
        lambda round_number: program.plan(round_number).steps,
        manifest.train.batch_tokens,
        lambda round_number: program.plan(round_number).is_overlapped,
    )


def round_settings_by_number(
    steering: Steering, program: RoundPlanner, checks_sums: bool = True
) -> Callable[[int], RoundSettings]:
    """Return a function that maps a round number to the settings of that round.

    Args:
        checks_sums: whether peers check each other's sums, as they do unless the manifest says that they are trusted.
    """
    run_id = steering.base.run_id

    def settings(round_number: int) -> RoundSettings:
        plan, manifest = program.plan(round_number), steering.manifest_at(round_number)
        topology, timing = plan.method.topology, manifest.round
        is_unchecked = manifest.admission.trusted or not checks_sums
        trust = {"reducers_per_part": 1} if topology.reduces_parts and is_unchecked else {}
        return RoundSettings(
            make_topology(topology.kind, run_id, len(plan.part_spans), **asdict(topology), **trust),
            timing.grace,
            timing.leader_timeout,
            timing.exchange_timeout,
            vote_memory=2 * manifest.membership.expiry,
            roster_quorum=plan.method.schedule.quorum,
        )

    return settings

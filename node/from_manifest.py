"""Build the method, the round planner and the round settings of a manifest."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict

from node.loop.exact_rounds import ExactOptions
from node.loop.steering import Steering
from node.model import Cut, cut_of, cuts_of, shape_table
from node.own_modules import own_registry
from node.own_tasks import require_task
from optim.compose import COMPONENTS, compose, with_small_memory
from optim.errors import OptimError, UnknownOption, UnknownRecipe
from optim.exact import exact_method
from optim.inner.base import WEIGHTS
from optim.inner.gradient_accumulation import ExternalOptimizer
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import TOPOLOGIES, Topology, make_topology
from protocol.errors import ManifestError, UsageError
from protocol.fault_words import shorten
from protocol.manifest.reading import ManifestText
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MemoryMode, TrainSection
from protocol.pipeline.stage import stage_of

MAX_ERROR_CHARACTERS = 1000  # of a method's error, which may quote a long value and name all recipes
RateOfOuterStep = Callable[[int, int, int], float]
OPTION_IN_ERROR = re.compile(r"^(?P<part>\w+)(?:\.(?P<option>\w+)| '[^']*' has no option '(?P<unknown>\w+)')?")


def build_method(manifest: Manifest) -> Method:
    """Build the manifest's method.

    Raises:
        ManifestError: unknown recipe, option or task.
        ComponentError: this machine lacks a module that the manifest names, or has another version of it.
    """
    table = manifest.pipeline
    registry = own_registry(manifest.method.modules)
    require_task(manifest)
    try:
        method = compose(manifest.method.recipe, manifest.method.overrides(), registry)
        if not table.is_exact:
            return method
        count = table.step_microbatches(manifest.train.batch_tokens, manifest.model.context)
        return exact_method(method, count, manifest.train.clip / math.sqrt(table.stages))
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


def build_own_loop_program(manifest: Manifest) -> RoundPlanner:
    """Build the round planner of a peer whose steps are made by a training loop of its own.

    Raises UsageError if the run needs more of a peer than the weights that its steps lead to.
    """
    method = build_method(manifest)
    signal = method.signal
    if signal.shared_names != (WEIGHTS,) or signal.consumed_names:
        raise UsageError(
            f"--own-loop: recipe {manifest.method.recipe} exchanges what its own optimizer keeps (signal "
            f"{signal.kind!r}); a training loop of yours fits recipes that exchange weights, such as frugal or diloco"
        )
    if manifest.pipeline.is_cut:
        raise UsageError("--own-loop: the run is cut into stages, which only our trainer can serve")
    if manifest.audits.share:
        raise UsageError("--own-loop: the run's peers repeat steps of one another, and nobody can repeat yours")
    return build_program(manifest, method.with_parts(inner=ExternalOptimizer()))


def build_node_program(
    manifest: Manifest, mode: MemoryMode | None, *, own_loop: bool = False, cut: Cut | None = None
) -> RoundPlanner:
    """Build the round planner of one node; with memory `mode`, by default the run's, for its own vectors.

    Raises ManifestError, or UsageError if the run does not allow what the node's options say.
    """
    planner = build_own_loop_program(manifest) if own_loop else build_program(manifest, cut=cut)
    if (mode or manifest.train.memory) == "normal":
        return planner
    try:
        return RoundPlanner(_with_small_memory(manifest, planner.method), planner.layout, manifest.round.parts)
    except OptimError as error:
        raise UsageError(f"--memory-mode small: {error}") from error


def in_memory_mode(manifest: Manifest, mode: MemoryMode | None) -> Manifest:
    """Return the manifest for estimates about a node with this mode, by default the run's; it has another run id."""
    if mode in (None, manifest.train.memory):
        return manifest
    return manifest.model_copy(update={"train": manifest.train.model_copy(update={"memory": mode})})


def _with_small_memory(manifest: Manifest, method: Method) -> Method:
    """Return the method with little memory. Raises UnknownOption if the run needs it to be as it is."""
    if manifest.audits.share:
        raise UnknownOption(
            "the run's peers repeat steps of one another, with moments of 32 bits; leave it out, or set audits.share "
            "to 0"
        )
    return with_small_memory(method)


def _require_fit(manifest: Manifest, method: Method) -> None:
    """Raise ManifestError if audits or pipelines exclude the method or one another."""
    if manifest.audits.share and not topology_class(method).has_shared_state:
        reason = f"peers of topology {method.topology.kind!r} have anchors of their own, which no auditor has"
        raise ManifestError(f"audits.share: {reason}; set it to 0, or choose another topology", ("audits", "share"))
    if manifest.train.memory == "small":
        try:
            _with_small_memory(manifest, method)
        except OptimError as error:
            raise ManifestError(f'train.memory = "small": {error}', ("train", "memory")) from error
    if manifest.anneal.share and not (manifest.target.rounds or manifest.target.tokens):
        reason = "the run has no end that it could be a part of; set target.tokens or target.rounds"
        raise ManifestError(f"anneal.share: {reason}", ("anneal", "share"))
    if not manifest.pipeline.is_cut:
        return
    if not topology_class(method).has_shared_state:
        reason = (
            f"peers of topology {method.topology.kind!r} have anchors of their own, so a stage has no common weights"
        )
        raise ManifestError(
            f"pipeline.stages: {reason}; set it to 1, or choose another topology", ("pipeline", "stages")
        )
    if method.inner.looks_ahead:
        reason = f"{method.inner.kind!r} takes its gradient at other weights than a stage computes with"
        raise ManifestError(f"method.inner: {reason}; choose another inner optimizer", ("method", "inner"))
    if manifest.audits.share:
        reason = "a stage's contributions hold microbatches of other peers, which no auditor can repeat"
        raise ManifestError(f"audits.share: {reason}; set it to 0", ("audits", "share"))


def require_program(manifest: Manifest, text: ManifestText) -> RoundPlanner:
    """Build the round planner of the first stage; a ManifestError names the file, the key and its line."""
    try:
        first, *_ = [build_program(manifest, cut=cut) for cut in _telling_cuts(manifest)]
        return first
    except ManifestError as error:
        if not error.keys:
            raise
        message = str(error).removeprefix("method: ").removeprefix(f"{'.'.join(error.keys)}: ")
        named = next((keys for keys in _tables_around(error.keys) if text.has(keys)), error.keys)
        raise text.fault_at(named, message) from error


def _telling_cuts(manifest: Manifest) -> list[Cut]:
    """Return stages that a method fits only if it fits all: the first, the last, and the smallest between them."""
    cuts, speeds = cuts_of(manifest), manifest.pipeline.speeds
    smallest = min(cuts[1:-1] or cuts, key=lambda cut: (speeds[cut.stage] if speeds else 1.0, -cut.stage))
    return list(dict.fromkeys((cuts[0], smallest, cuts[-1])))


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

    The factor is a linear warm-up times the decay of `train.schedule` to `final_share`. `age_at_join` is the run's age
    in inner steps when this trainer joined: it warms up like every trainer, but to the rate that the others have by
    then.
    """
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return warmup
    left = _share_left(train, min(1.0, (age_at_join + step) / train.decay_steps))
    return warmup * (train.final_share + (1 - train.final_share) * left)


def _share_left(train: TrainSection, passed: float) -> float:
    """Return the decay that is left, from 1 to 0, when the share `passed` of the decay steps has passed.

    cosine: (1 + cos(pi * p)) / 2;  linear: 1 - p;  wsd (arXiv 2404.06395): min(1, (1 - p) / decay_share)
    """
    match train.schedule:
        case "cosine":
            return (1 + math.cos(math.pi * passed)) / 2
        case "linear":
            return 1 - passed
        case "wsd":
            return min(1.0, (1 - passed) / train.decay_share)


def exact_options(manifest: Manifest) -> ExactOptions | None:
    """Return our part of a pipeline with exact steps; None in other runs."""
    table, stage = manifest.pipeline, stage_of(manifest)
    if not table.is_exact or stage is None:
        return None
    return ExactOptions(table.step_microbatches(manifest.train.batch_tokens, manifest.model.context), stage)


def rate_of_outer_steps(steering: Steering, program: RoundPlanner) -> RateOfOuterStep:
    """Return a function that gives the factor of the learning rate of an outer step.

    Its arguments are the number of outer steps before it, and rounds and tokens of the run before it.
    """

    def rate(step: int, rounds: int, tokens: int) -> float:
        manifest = steering.manifest_at(rounds)
        return learning_rate_scale(manifest.train, program.steps_before(step)) * manifest.rate_factor(rounds, tokens)

    return rate


def build_pacing(manifest: Manifest, program: RoundPlanner) -> Pacing:
    """Build the pacing of the rounds."""
    return Pacing(
        manifest.round.grace,
        lambda round_number: program.plan(round_number).steps,
        manifest.train.batch_tokens,
        lambda round_number: program.plan(round_number).is_overlapped,
        lambda round_number: program.plan(round_number).lead,
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
            vote_memory=manifest.membership.vote_memory,
            roster_quorum=plan.method.schedule.quorum,
            awaits_standing=manifest.pipeline.is_exact,
        )

    return settings

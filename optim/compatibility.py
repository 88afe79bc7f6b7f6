"""Rules about components that exclude each other: each raises one line that says what to choose instead."""

from optim.aggregation.filtered import Filtered
from optim.aggregation.mean import WeightedMean
from optim.aggregation.robust import CentredClip, CoordinateMedian, Krum, TrimmedMean
from optim.codecs.base import Codec
from optim.codecs.dct_topk import DctTopK
from optim.codecs.random_projection import RandomProjection
from optim.codecs.sign import BlockSign
from optim.codecs.subset import RandomSubset
from optim.codecs.topk import ChunkTopK
from optim.errors import UnknownOption
from optim.method import Method
from optim.outer import FrozenAdam, Gossip, GossipWeights, Replace, consensus_factor
from optim.recipes import OptionTable
from optim.signals import Momentum

ROBUST = (TrimmedMean, CoordinateMedian, Krum, CentredClip, Filtered)
BY_COORDINATE_OR_DISTANCE = (TrimmedMean, CoordinateMedian, Krum)
MIN_GROUP = 3  # of two members, no rule can tell which one lies


def check_compatibility(method: Method, round_number: int) -> None:
    """Check that the components of a method, with the options of that round, fit together.

    Raises:
        UnknownOption: they do not; one line that says what to choose instead.
    """
    signal, update = method.signal, method.update
    if signal.kind not in update.signals:
        raise UnknownOption(
            f"update {update.kind!r} does not accept signal {signal.kind!r}; "
            f"it accepts {' or '.join(map(repr, update.signals))}"
        )
    if isinstance(signal, Momentum) and isinstance(update, FrozenAdam) and signal.beta != update.beta1:
        raise UnknownOption(
            f"signal.beta = {signal.beta} and update.beta1 = {update.beta1} are the same momentum; set both"
        )
    if isinstance(update, FrozenAdam) and round_number < update.warm_rounds and isinstance(method.codec, BlockSign):
        warm = update.warm_rounds
        raise UnknownOption(
            f"update.warm_rounds = {warm} rounds learn the squares of gradients, which signs do not contain; "
            f'set codec.kind = [{{ value = "none", rounds = {warm} }}, "sign"]'
        )
    if method.feedback.keeps_error and not method.codec.is_contractive:
        raise UnknownOption(
            f"error feedback would let the residual of codec {method.codec.kind!r} grow without bound; "
            "set feedback.kind = 'none'"
        )
    if method.aggregate.keeps_block_statistics and (method.topology.reduces_parts or not method.schedule.is_whole):
        raise UnknownOption(
            f"aggregate {method.aggregate.kind!r} keeps statistics of every block: set topology.kind = 'gather' and "
            "schedule.fragments = 1 and experts_every = 1, or aggregate.statistics = 'round'"
        )
    if method.schedule.experts == "trained":
        _check_trained_experts(method)
    if update.counts_steps and method.schedule.experts_every > 1:
        raise UnknownOption(
            f"schedule.experts_every: update {update.kind!r} counts its steps, and experts have fewer; set it to 1"
        )
    if isinstance(method.aggregate, Filtered) and method.aggregate.memory and method.topology.reduces_parts:
        raise UnknownOption(
            "a reducer sees only its part and remembers no contribution: set topology.kind = 'gather', "
            "or aggregate.memory = 0"
        )
    if method.adoption.unsent and signal.kind != "pseudo-gradient":
        raise UnknownOption(
            f"the residual of signal {signal.kind!r} is not progress to train on from; set adoption.unsent = 0"
        )
    if group_size := method.topology.group_size:
        _check_consensus(update, group_size)


def _check_trained_experts(method: Method) -> None:
    """Check that peers can leave experts out, and average each over those who sent it."""
    others = 'set schedule.experts = "all"'
    if method.signal.kind != "pseudo-gradient":
        raise UnknownOption(f"schedule.experts: signal {method.signal.kind!r} is sent whole; {others}")
    if method.update.counts_steps:
        raise UnknownOption(
            f"schedule.experts: update {method.update.kind!r} counts its steps, and experts have fewer; {others}"
        )
    if not isinstance(method.aggregate, WeightedMean):
        raise UnknownOption(
            f"schedule.experts: aggregate {method.aggregate.kind!r} cannot combine each expert from its senders alone; "
            f'{others}, or aggregate.kind = "mean", "sender-mean" or "filtered"'
        )
    if method.topology.group_size:
        raise UnknownOption(f"schedule.experts: in groups of few peers an expert may have no sender; {others}")
    if method.codec.depends_on_round:
        raise UnknownOption(
            f"schedule.experts: members that send different experts would send different values by codec "
            f"{method.codec.kind!r}; {others}"
        )


def _check_consensus(update: object, size: int) -> None:
    """Check that the outer step of groups, whose peers have anchors of their own, makes the anchors converge."""
    if isinstance(update, Replace):
        return
    if not isinstance(update, Gossip | GossipWeights):
        raise UnknownOption("in groups the peers' anchors differ; set update.kind to gossip, gossip-weights or replace")
    factor = consensus_factor(update.alpha, update.gamma, size)
    if factor >= 1:
        option = "gamma" if isinstance(update, Gossip) else "beta"
        raise UnknownOption(
            f"with update.alpha = {update.alpha} and update.{option} = {update.gamma} anchors in groups of {size} do "
            f"not converge (their variance changes by a factor of {factor:.2f} per round); "
            + (f"lower update.{option} or update.alpha" if update.gamma else f"raise update.{option} above 0")
        )


def check_defence(method: Method, own_rule: OptionTable) -> None:
    """Check that a rule against liars leaves learning as it is; `own_rule` is the aggregate of the recipe itself.

    Raises:
        UnknownOption: it breaks the method, or cannot do anything in it.
    """
    rule, codec, group_size = method.aggregate, method.codec, method.topology.group_size
    if not isinstance(rule, ROBUST):
        return
    if group_size and group_size < MIN_GROUP:
        raise UnknownOption(
            f"aggregate {rule.kind!r} cannot find a liar in groups of {group_size}; "
            f"set topology.size = {MIN_GROUP} or more, or aggregate.kind = 'mean'"
        )
    if isinstance(rule, BY_COORDINATE_OR_DISTANCE) and _sends_few_coordinates(codec):
        raise UnknownOption(
            f"aggregate {rule.kind!r} would drop most progress, because codec {codec.kind!r} sends few coordinates and "
            "each member others; set aggregate.kind = 'filtered'"
        )
    means_senders = own_rule["kind"] == "sender-mean" or own_rule.get("over") == "senders"
    if means_senders and not (isinstance(rule, Filtered) and rule.over == "senders"):
        raise UnknownOption(
            f"aggregate {rule.kind!r} divides by all members where recipe {method.name!r} divides by those that sent a "
            'value, and would shorten its steps several times; set aggregate = { kind = "filtered", over = "senders" }'
        )
    if isinstance(rule, Filtered) and (isinstance(codec, RandomProjection) or not method.signal.is_delta):
        raise UnknownOption(
            f"aggregate 'filtered' compares the directions of progress, which signal {method.signal.kind!r} with codec "
            f"{codec.kind!r} does not show; set aggregate.kind = 'mean' and aggregate.clip = true"
        )


def _sends_few_coordinates(codec: Codec) -> bool:
    """Return whether members send different few coordinates, so that most are zero in most contributions."""
    return isinstance(codec, ChunkTopK | DctTopK) or (isinstance(codec, RandomSubset) and not codec.shared)

"""Which parts go together: what can be told before a run that its method cannot do."""

from optim.codecs.signs import BlockSign
from optim.errors import UnknownOption
from optim.method import Method
from optim.signals import Momentum
from optim.topologies import Groups
from optim.updates import FrozenAdam, Gossip, GossipWeights, Replace, consensus_factor


def check_compatibility(method: Method, round_number: int) -> None:
    """UnknownOption, one line that says what to choose instead. `method`: with the options of that round."""
    signal, update = method.signal, method.update
    if signal.kind not in update.signals:
        raise UnknownOption(
            f"update {update.kind!r} makes no step of signal {signal.kind!r}; "
            f"it takes {' or '.join(map(repr, update.signals))}"
        )
    if isinstance(signal, Momentum) and isinstance(update, FrozenAdam) and signal.beta != update.beta1:
        raise UnknownOption(f"signal.beta = {signal.beta} and update.beta1 = {update.beta1} are one momentum; set both")
    if isinstance(update, FrozenAdam) and round_number < update.warm_rounds and isinstance(method.codec, BlockSign):
        warm = update.warm_rounds
        raise UnknownOption(
            f"in update.warm_rounds = {warm} squares of gradients are learned, of which signs tell nothing; "
            f"set codec.kind = 'none until {warm} then sign'"
        )
    if method.feedback.keeps_error and not method.codec.is_contractive:
        raise UnknownOption(
            f"what codec {method.codec.kind!r} leaves over only grows under error feedback; set feedback.kind = 'none'"
        )
    if method.aggregate.state_size and (method.topology.kind == "butterfly" or method.schedule.fragments > 1):
        raise UnknownOption(
            f"aggregate {method.aggregate.kind!r} remembers every block: set topology.kind = 'gather' and "
            "schedule.fragments = 1, or aggregate.statistics = 'round'"
        )
    if method.adoption.unsent and signal.kind != "pseudo-gradient":
        raise UnknownOption(
            f"what is left of signal {signal.kind!r} is no progress to train on from; set adoption.unsent = 0"
        )
    if isinstance(method.topology, Groups):
        _check_consensus(update, method.topology.size)


def _check_consensus(update: object, size: int) -> None:
    """In groups every peer has an anchor of its own: the update must bring them together faster than they part."""
    if isinstance(update, Replace):
        return
    if not isinstance(update, Gossip | GossipWeights):
        raise UnknownOption("in groups the peers' anchors differ; set update.kind to gossip, gossip-weights or replace")
    factor = consensus_factor(update.alpha, update.gamma, size)
    if factor >= 1:
        pull = "gamma" if isinstance(update, Gossip) else "beta"
        raise UnknownOption(
            f"with update.alpha = {update.alpha} and update.{pull} = {update.gamma} anchors in groups of {size} do not "
            f"come together (their variance goes by {factor:.2f} a round); "
            + (f"lower update.{pull} or update.alpha" if update.gamma else f"raise update.{pull} above 0")
        )

"""Groups of rollouts: their messages, the numbers of their questions, and the checks before any tensor is built.

A rollout peer follows the chain of the run. With the weights after round r it answers questions, `rl.group` answers to
each, in an order that nobody chooses: the group number `serial` of a maker in a round has the question and the noise
that follow from (run, round, maker, serial), and serials begin at 0 without gaps. So a maker decides neither what it
answers nor how the dice fall, and withholds nothing that went badly: a gap ends its credit for the round. It makes at
most `rl.ahead + 1` batches in a round, a batch being the groups of one round of one trainer.

Trainers share the groups of a round by a rendezvous hash (Thaler & Ravishankar 1998), which all of them compute alike
over the trainers of the last commits before it and newcomers that live when it begins (`share_round`). A trainer that
comes later takes none of its groups, unless nobody else is left.
"""

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from protocol import murmur_pb2 as wire
from protocol.errors import LimitError, MalformedError
from protocol.fault_words import shorten
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.manifest.sections import ReinforcementSection
from protocol.scored_tasks import Question, ScoredTask
from protocol.signing import MAX_ROUND, open_signed, sign

GROUP_KIND: Final = "rollout"
MAX_GROUP_BYTES: Final = 512 * 1024
MAX_REPLY_BYTES: Final = 512 * 1024  # of groups in one reply; one group always fits
CALL_SECONDS: Final = 10.0  # for one page
MAX_DEVICE_CHARACTERS: Final = 96
MAX_REASON_CHARACTERS: Final = 200  # of why a trainer refused a group
SILENT_ROUNDS: Final = 2  # without a contribution, after which the groups of a trainer go to the others
RETRY_ROUNDS: Final = 4  # between two rounds in which a silent trainer gets its part, in case it is back
LEAST_LOG_PROBABILITY: Final = -100.0  # nats; no token that was drawn is as unlikely


@dataclass(frozen=True)
class DrawnAnswer:
    """Token ids with the stop that ends them, and the log probability of each in nats when it was drawn, in fp32."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True)
class RolloutGroup:
    """The answers to one question, drawn with the weights after `round` by a device of a class (`device_class`)."""

    round: int
    serial: int
    device: str
    answers: tuple[DrawnAnswer, ...]

    @property
    def place(self) -> "Place":
        return Place(self.round, self.serial)

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def to_wire(self) -> wire.RolloutGroup:
        return wire.RolloutGroup(
            round=self.round, serial=self.serial, device=self.device, answers=map(_answer_to_wire, self.answers)
        )

    @classmethod
    def from_wire(cls, body: wire.RolloutGroup, limits: "GroupLimits") -> Self:
        """Read a group; nothing of it is copied before its sizes are known. Raises PeerFault."""
        limits.check(body)
        return cls(body.round, body.serial, body.device, tuple(map(_answer_from_wire, body.answers)))


@dataclass(frozen=True, order=True)
class Place:
    """A group's place in the order of its maker."""

    round: int = 0
    serial: int = 0

    @property
    def next(self) -> "Place":
        return Place(self.round, self.serial + 1)


@dataclass(frozen=True)
class GroupLimits:
    """The sizes that a manifest allows to a group.

    Attributes:
        answers: in a group, no fewer.
        answer_tokens: the most of one answer.
        vocabulary: token ids are below it.
        serials: of one maker in one round.
    """

    answers: int
    answer_tokens: int
    vocabulary: int
    serials: int

    @classmethod
    def of(cls, manifest: Manifest, steps: int) -> Self:
        """Return the limits of a run whose rounds have at most this number of inner steps."""
        rl = require_rl(manifest)
        return cls(rl.group, rl.answer_tokens, manifest.model.vocabulary, groups_of_round(rl, steps))

    def check(self, body: wire.RolloutGroup) -> None:
        """Raise PeerFault unless a group has the shape that the manifest prescribes."""
        if body.round > MAX_ROUND:
            raise MalformedError(f"rollouts of round {body.round}, which is out of range")
        if body.serial >= self.serials:
            raise LimitError(f"rollout group {body.serial} of a round; at most {self.serials} are allowed")
        if len(body.answers) != self.answers:
            raise MalformedError(f"a group of {len(body.answers)} answers; the run has {self.answers}")
        if len(body.device) > MAX_DEVICE_CHARACTERS or not body.device.isprintable():
            raise MalformedError("the device of a rollout has a name that is not one line of text")
        for answer in body.answers:
            self._check_answer(answer)

    def _check_answer(self, answer: wire.RolloutAnswer) -> None:
        if not 1 <= len(answer.tokens) <= self.answer_tokens:
            raise MalformedError(f"an answer of {len(answer.tokens)} tokens; at most {self.answer_tokens} are allowed")
        if len(answer.log_probabilities) != 4 * len(answer.tokens):
            raise MalformedError("an answer whose log probabilities do not match its tokens")
        if max(answer.tokens) >= self.vocabulary:
            raise MalformedError(f"an answer with token {max(answer.tokens)}; the model knows {self.vocabulary}")


def _answer_to_wire(answer: DrawnAnswer) -> wire.RolloutAnswer:
    packed = struct.pack(f"<{len(answer.log_probabilities)}f", *answer.log_probabilities)
    return wire.RolloutAnswer(tokens=answer.tokens, log_probabilities=packed)


def _answer_from_wire(answer: wire.RolloutAnswer) -> DrawnAnswer:
    values = struct.unpack(f"<{len(answer.tokens)}f", answer.log_probabilities)
    if not all(LEAST_LOG_PROBABILITY <= value <= 0.0 for value in values):  # NaN is not at least it
        raise MalformedError("a log probability that no token has")
    return DrawnAnswer(tuple(answer.tokens), values)


def groups_of_round(rl: ReinforcementSection, steps: int) -> int:
    """Return how many groups one maker draws at most in a round of so many inner steps."""
    return (rl.ahead + 1) * rl.groups * steps


def require_rl(manifest: Manifest) -> ReinforcementSection:
    """Return the table [rl] of a run that has one."""
    assert manifest.rl is not None
    return manifest.rl


def sign_group(identity: Identity, run_id: RunId, group: RolloutGroup) -> wire.Signed:
    return sign(identity, GROUP_KIND, run_id, group.to_wire())


@dataclass(frozen=True)
class SignedGroup:
    """A group whose signature and shape were checked."""

    maker: PeerId
    group: RolloutGroup


def open_group(signed: wire.Signed, run_id: RunId, maker: PeerId, limits: GroupLimits) -> SignedGroup:
    """Check a group that its maker serves. Raises PeerFault."""
    if signed.peer != maker:
        raise MalformedError(f"{maker} serves a group of {shorten(signed.peer)}")
    body = open_signed(signed, run_id, GROUP_KIND, wire.RolloutGroup, MAX_GROUP_BYTES)
    return SignedGroup(maker, RolloutGroup.from_wire(body, limits))


def question_of(task: ScoredTask, run_id: RunId, maker: PeerId, place: Place) -> Question:
    """Make the question of a group, which its maker cannot choose."""
    return task.question(run_id, question_number(run_id, maker, place))


def question_number(run_id: RunId, maker: PeerId, place: Place) -> int:
    """Return the number of a group's question, below 2^63."""
    return _hash("question", run_id, place.round, maker, place.serial) >> 1


def noise_parts(run_id: RunId, maker: PeerId, place: Place, sample: int) -> tuple[str | int, ...]:
    """Return the parts of the key of an answer's noise (`optim.rollouts.noise_key`)."""
    return ("rollout", run_id, place.round, maker, place.serial, sample)


def owner_of(trainers: Iterable[PeerId], run_id: RunId, maker: PeerId, place: Place) -> PeerId:
    """Return the trainer, of at least one, that learns from a group."""
    return max(trainers, key=lambda each: (_hash("owner", run_id, place.round, maker, place.serial, each), each))


def share_round(number: int, newest: Mapping[PeerId, int], live: Collection[PeerId]) -> frozenset[PeerId]:
    """Return the trainers that share the groups of a round.

    Args:
        newest: for each trainer of the chain the newest round, up to this one, whose weights have a contribution of it.
        live: by their records, which stay for a while after a death.
    """
    silence = {trainer: number - last for trainer, last in newest.items()}
    working = {trainer for trainer, rounds in silence.items() if rounds < SILENT_ROUNDS}
    back = {trainer for trainer in live if silence.get(trainer, 0) % RETRY_ROUNDS == 0}
    return frozenset(working | back)


def _hash(*parts: str | int) -> int:
    text = "\0".join(map(str, ("murmur rollout", *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def page_of(groups: Iterable[wire.Signed]) -> list[wire.Signed]:
    """Return as many groups, from the first on, as one reply holds."""
    page, size = list[wire.Signed](), 0
    for signed in groups:
        size += signed.ByteSize()
        if page and size > MAX_REPLY_BYTES:
            break
        page.append(signed)
    return page


def check_page(groups: Sequence[wire.Signed], since: Place) -> None:
    """Raise PeerFault if a reply is larger than one page."""
    if sum(signed.ByteSize() for signed in groups) > MAX_REPLY_BYTES + MAX_GROUP_BYTES:
        raise LimitError(f"more rollouts since round {since.round} in one reply than a page holds")

"""In virtual time: eight rollout peers give eight times the groups of one, and two trainers learn each of them once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from node.rollout.outbox import GroupOutbox, HeldGroup
from protocol.identity import Identity
from protocol.rollout_groups import (
    DrawnAnswer,
    GroupLimits,
    Place,
    RolloutGroup,
    open_group,
    page_of,
    share_round,
    sign_group,
)
from protocol.rollout_intake import RolloutIntake

RUN = "ab" * 32
MAKERS = [Identity.create() for _ in range(8)]
POLL, RATE, SECONDS = 0.5, 2.0, 50.0  # of a trainer's look, groups a second of a peer, of the whole
GROUPS, STEPS, AHEAD, MAX_AGE = 4, 8, 1, 4
SERIALS = (AHEAD + 1) * GROUPS * STEPS
LIMITS = GroupLimits(answers=2, answer_tokens=4, vocabulary=16, serials=SERIALS)
ANSWER = DrawnAnswer((1, 2), (-0.5, -1.0))


class Maker:
    """A rollout peer that sees a new round a while after the trainers."""

    def __init__(self, identity: Identity, delay: float, rate: float = RATE, share: float = 1.0) -> None:
        self.identity = identity
        self._rate = rate
        self._share = share
        self._delay = delay
        self._due = 0.0
        self.outbox = GroupOutbox(SERIALS, MAX_AGE)

    def work(self, now: float, begun: list[float]) -> None:
        known = sum(at + self._delay <= now for at in begun)
        self.outbox.begin_round(known, SERIALS, self._share)
        while self._due <= now and (places := self.outbox.next_places(1)):
            group = RolloutGroup(places[0].round, places[0].serial, "cpu", (ANSWER, ANSWER))
            self.outbox.add([HeldGroup(places[0], sign_group(self.identity, RUN, group))])
            self._due = max(self._due, now - POLL) + 1 / self._rate


@dataclass
class Sharing:
    """The trainers of a swarm: `dead` is silent in some rounds; its record lives on.

    By `keeps_dead` it has its part all the same, as if only records decided.
    """

    names: list[str]
    dead: str = ""
    silent: range = range(0)
    keeps_dead: bool = False
    newest: dict[str, int] = field(default_factory=dict)

    def working(self, number: int) -> list[str]:
        return [name for name in self.names if name != self.dead or number not in self.silent]

    def commit(self, number: int) -> None:
        """Let the working trainers make the weights after this round."""
        self.newest |= dict.fromkeys(self.working(number), number + 1)

    def share(self, number: int) -> frozenset[str]:
        return frozenset(self.names) if self.keeps_dead else share_round(number, self.newest, self.names)


def learn(makers: int, trainers: int, sharing: Sharing | None = None) -> Counter[tuple[str, Place]]:
    """Return how often each group was learned; a round ends once each trainer has as many as its steps take."""
    peers = [Maker(identity, 0.3 * number) for number, identity in enumerate(MAKERS[:makers])]
    names = names_of(trainers)
    sharing = sharing or Sharing(names)
    pools = {name: RolloutIntake(RUN, name, SERIALS, MAX_AGE) for name in names}
    begun, missing, learned = list[float](), dict.fromkeys(names, GROUPS * STEPS), Counter[tuple[str, Place]]()
    for pool in pools.values():
        pool.begin_round(0, sharing.share(0))
    for tick in range(int(SECONDS / POLL)):
        now = tick * POLL
        for peer in peers:
            peer.work(now, begun)
        working = sharing.working(len(begun))
        for name in working:
            pool = pools[name]
            for maker, since in pool.wanted(peer.identity.peer_id for peer in peers).items():
                own = next(peer for peer in peers if peer.identity.peer_id == maker)
                for signed in page_of(own.outbox.serve(name, since)):
                    pool.offer(open_group(signed, RUN, maker, LIMITS))
            taken = pool.take(missing[name], len(begun))
            missing[name] -= len(taken)
            learned.update((each.maker, each.group.place) for each in taken)
        if not any(missing[name] for name in working):
            sharing.commit(len(begun))
            begun.append(now)
            missing = dict.fromkeys(names, GROUPS * STEPS)
            for pool in pools.values():
                pool.begin_round(len(begun), sharing.share(len(begun)))
    return learned


def names_of(trainers: int) -> list[str]:
    return [f"trainer {number}" for number in range(trainers)]


@pytest.mark.parametrize("makers", [1, 2, 4, 8])
def test_groups_grow_with_the_rollout_peers(makers: int) -> None:
    assert learn(makers, 1).total() >= 0.95 * makers * RATE * SECONDS


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_each_group_is_learned_by_one_trainer(trainers: int) -> None:
    learned = learn(3, trainers)
    assert max(learned.values()) == 1
    assert learned.total() > 0.8 * 3 * RATE * SECONDS


def test_the_groups_of_a_dead_trainer_go_to_the_others_after_two_rounds() -> None:
    """Also where its record lives on. Where that decides, as in the control, no round is learned whole any more."""
    names = names_of(3)

    def lost(silent: range, *, keeps_dead: bool) -> set[int]:
        """Return the rounds some of whose groups nobody learned, although later ones of their makers were learned."""
        learned = learn(8, 3, Sharing(names, names[0], silent, keeps_dead))
        assert max(learned.values()) == 1
        newest = {(maker, place.round): place.serial for maker, place in sorted(learned)}
        return {
            number
            for (maker, number), last in newest.items()
            if any((maker, Place(number, serial)) not in learned for serial in range(last))
        }

    assert not {4, 5} & lost(range(2, 99), keeps_dead=False)
    assert {4, 5} <= lost(range(2, 99), keeps_dead=True)
    assert not {4, 5} & lost(range(2, 6), keeps_dead=False), "and it is back in round 6"


@pytest.mark.parametrize(
    ("newest", "live", "shared"),
    [
        ({}, ["a", "b"], "ab"),
        ({"a": 9, "b": 10}, ["a", "b"], "ab"),
        ({"a": 9, "b": 10}, [], "ab"),
        ({"a": 8, "b": 10}, ["a", "b"], "b"),
        ({"a": 6, "b": 10}, ["a", "b"], "ab"),
        ({"a": 6, "b": 10}, ["b"], "b"),
        ({"a": 7, "b": 10}, ["a", "b", "new"], ["b", "new"]),
    ],
)
def test_trainers_of_the_last_commits_and_newcomers_share_a_round(
    newest: dict[str, int], live: list[str], shared: Sequence[str]
) -> None:
    assert share_round(10, newest, live) == frozenset(shared)


@pytest.mark.parametrize("makers", [1, 3, 8])
def test_makers_that_are_faster_than_the_trainer_do_not_let_groups_grow_old(makers: int) -> None:
    """A trainer takes a batch in ten seconds, and its makers could draw fifty."""
    peers = [Maker(identity, 0.0, 5 * GROUPS * STEPS / makers, 1 / makers) for identity in MAKERS[:makers]]
    pool, begun, ages = RolloutIntake(RUN, "trainer", SERIALS, MAX_AGE), list[float](), list[int]()
    for tick in range(200):
        now = tick * POLL
        if tick % 20 == 0:
            begun.append(now)
            pool.begin_round(len(begun), ["trainer"])
            ages += [len(begun) - each.group.place.round for each in pool.take(GROUPS * STEPS, len(begun))]
        for peer in peers:
            peer.work(now, begun)
        for maker, since in pool.wanted(peer.identity.peer_id for peer in peers).items():
            own = next(peer for peer in peers if peer.identity.peer_id == maker)
            for signed in page_of(own.outbox.serve("trainer", since)):
                if not pool.is_full:
                    pool.offer(open_group(signed, RUN, maker, LIMITS))
    assert len(ages) >= 8 * GROUPS * STEPS and pool.counts["too old"] == 0
    assert max(ages) <= 2 * (AHEAD + 1), "of what the pool and the makers together hold"

"""The daemon fetches groups of admitted rollout peers, hands them out once, and strikes liars."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from node.daemon.rollouts import MakerFigures, RolloutFeed
from node.trainer.ipc.channel import AnchorApplied, Ready, ToTrainer
from node.trainer.ipc.rollout_messages import GroupVerdict, RolloutFound, RolloutsJudged, RolloutsWanted
from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import RolloutGroup as WireGroup
from protocol.murmur_pb2 import RolloutsReply
from protocol.rollout_groups import Place, groups_of_round, require_rl, sign_group
from tests.node.trainer.test_reinforcement import MANIFEST
from tests.protocol.test_rollouts import ANSWER, GROUP, MAKERS

READY = Ready(device="cpu", step=0, round=3, outstanding=None)
NAMES = [maker.peer_id for maker in MAKERS]


class Peers(RolloutFeed):
    """A feed whose rollout peers serve `served` groups of round 3, and which collects what the trainer gets."""

    def __init__(self) -> None:
        self.sent = list[RolloutFound]()
        self.lines = list[str]()
        self.asked = list[tuple[PeerId, Place]]()
        self.served = dict.fromkeys(NAMES, 4)
        self.answers = 8
        self.dead = set[PeerId]()
        self.live = ["me"]
        self.chain = chain = SimpleNamespace(round=3, log=SimpleNamespace(commits=()))
        planner = SimpleNamespace(plan=lambda number: SimpleNamespace(steps=5 if number else 1), max_steps=9)
        state = SimpleNamespace(
            manifest=MANIFEST, run_id=MANIFEST.run_id, planner=planner, replicated=SimpleNamespace(chain=chain)
        )
        view = SimpleNamespace(rollout_peers=lambda: NAMES, trainers=lambda: self.live, other_trainers=self._others)
        status = SimpleNamespace(record_recovered=lambda reason, line: self.lines.append(line))
        node = SimpleNamespace(transport=None, peer_id="me")
        faults = SimpleNamespace(fail=self._fail)
        super().__init__(
            cast(Any, node), cast(Any, state), cast(Any, view), self._collect, cast(Any, faults), cast(Any, status)
        )

    def share(self, *senders: str) -> None:
        """Let these have made the weights of the newest round; they are live."""
        made_by = tuple(SimpleNamespace(sender=sender) for sender in senders)
        commit = SimpleNamespace(body=SimpleNamespace(round=self.chain.round - 1, contributions=made_by))
        self.chain.log = SimpleNamespace(commits=(*self.chain.log.commits, commit))
        self.live = sorted({*self.live, *senders})

    def advance(self, *senders: str) -> None:
        self.chain.round += 1
        self.share(*senders)

    def _others(self) -> list[str]:
        return [each for each in self.live if each != "me"]

    def _fail(self, error: BaseException) -> None:
        raise AssertionError(error)

    async def _collect(self, message: ToTrainer) -> bool:
        assert isinstance(message, RolloutFound)
        self.sent.append(message)
        return True

    async def _call(self, maker: PeerId, since: Place) -> RolloutsReply:
        self.asked.append((maker, since))
        if maker in self.dead:
            raise UnreachableError(f"{maker} is gone")
        identity = MAKERS[NAMES.index(maker)]
        first = since.serial if since.round == 3 else 0
        answers = (ANSWER,) * self.answers
        groups = [
            replace(GROUP, round=3, serial=serial, answers=answers) for serial in range(first, self.served[maker])
        ]
        return RolloutsReply(groups=[sign_group(identity, MANIFEST.run_id, group) for group in groups])

    async def turn(self) -> None:
        await self._poll()
        for _ in range(50):
            await asyncio.sleep(0)

    @property
    def places(self) -> list[tuple[PeerId, int]]:
        return [(found.maker, WireGroup.FromString(found.body).serial) for found in self.sent]


def judged(*verdicts: GroupVerdict) -> RolloutsJudged:
    return RolloutsJudged(verdicts=verdicts, skipped=1, entropy=1.5, mismatch=0.1, effective=0.9, clipped=0.2)


def verdict(
    maker: PeerId, serial: int, refusal: str = "", *, is_proof: bool = False, reward: float = 0.5
) -> GroupVerdict:
    return GroupVerdict(
        maker=maker, round=3, serial=serial, age=0, refusal=refusal, is_proof=is_proof, reward=reward, tokens=24,
        answers=8,
    )  # fmt: skip


async def test_trainer_gets_as_many_groups_as_it_wants_oldest_first() -> None:
    feed = Peers()
    await feed.turn()
    assert feed.asked == [], "the trainer is not ready"
    feed.on_trainer_message(READY)
    await feed.turn()
    assert feed.sent == []
    feed.on_trainer_message(RolloutsWanted(count=5))
    await feed.turn()
    assert [serial for _, serial in feed.places] == [0, 0, 0, 1, 1]
    assert (NAMES[0], Place(3, 4)) in feed.asked
    feed.on_trainer_message(RolloutsWanted(count=50))
    await feed.turn()
    assert len(set(feed.places)) == 12, "each group once"


async def test_all_groups_that_an_honest_maker_may_draw_are_taken_in_rounds_that_grow() -> None:
    """The first round has one step, this one five, and some have nine."""
    feed, rl = Peers(), require_rl(MANIFEST)
    feed.served = dict.fromkeys(NAMES, 0) | {NAMES[0]: groups_of_round(rl, 9)}
    feed.on_trainer_message(READY)
    for _ in range(40):
        feed.on_trainer_message(RolloutsWanted(count=50))
        await feed.turn()
    assert feed.intake.capacity == groups_of_round(rl, 5)
    assert len(feed.places) == feed.served[NAMES[0]] and not feed.lines


async def test_restarted_trainer_gets_the_groups_after_its_snapshot_again() -> None:
    feed = Peers()
    feed.on_trainer_message(READY)
    feed.on_trainer_message(RolloutsWanted(count=12))
    await feed.turn()
    await feed.turn()
    feed.sent.clear()
    feed.on_trainer_message(
        READY.model_copy(update={"learned": ((NAMES[0], 3, 2), (NAMES[1], 3, 4), (NAMES[2], 3, 4))})
    )
    feed.on_trainer_message(RolloutsWanted(count=12))
    await feed.turn()
    assert feed.places == [(NAMES[0], 2), (NAMES[0], 3)]


async def test_newcomer_takes_no_groups_of_a_round_that_others_share() -> None:
    """From the next round on it has its part; if the others vanish before, all groups are its own at once."""
    for vanish in (False, True):
        feed = Peers()
        feed.served = {NAMES[0]: 4}
        feed.share("other")
        feed.on_trainer_message(READY)
        feed.on_trainer_message(RolloutsWanted(count=12))
        await feed.turn()
        assert feed.asked == []
        if vanish:
            feed.live = ["me"]
        else:
            feed.advance("other")
        await feed.turn()
        assert feed.asked
        expected = {"me"} if vanish else {"me", "other"}
        assert feed.intake.sharers(feed.chain.round) == expected


async def test_trainer_that_took_part_shares_with_those_that_came() -> None:
    feed = Peers()
    feed.share("me")
    feed.on_trainer_message(READY)
    await feed.turn()
    feed.live = ["me", "newcomer"]
    assert feed.intake.sharers(3) == {"me"}, "the newcomer waits for the next round"
    feed.advance("me")
    await feed.turn()
    assert feed.intake.sharers(4) == {"me", "newcomer"}
    assert feed.intake.sharers(3) == {"me"}


async def test_trainer_without_contributions_loses_its_part_although_its_record_lives() -> None:
    """In every fourth round it has one, in case it is back, and all of them from its first contribution on."""
    feed = Peers()
    feed.share("me", "dead")
    feed.on_trainer_message(READY)
    shares = list[bool]()
    for senders in (["me"],) * 4 + (["me", "dead"],) + (["me"],):
        feed.advance(*senders)
        await feed.turn()
        shares.append("dead" in feed.intake.sharers(feed.chain.round))
    assert shares == [True, False, False, True, True, True]


async def test_groups_of_weights_that_the_trainer_lacks_wait() -> None:
    feed = Peers()
    feed.on_trainer_message(READY.model_copy(update={"round": 2}))
    feed.on_trainer_message(RolloutsWanted(count=2))
    await feed.turn()
    assert feed.sent == []
    feed.on_trainer_message(AnchorApplied(round=3))
    await feed.turn()
    assert len(feed.sent) == 2


async def test_dead_peer_delays_nobody_and_is_asked_again() -> None:
    feed = Peers()
    feed.dead.add(NAMES[0])
    feed.on_trainer_message(READY)
    feed.on_trainer_message(RolloutsWanted(count=50))
    await feed.turn()
    await feed.turn()
    assert {maker for maker, _ in feed.places} == set(NAMES[1:])
    feed.dead.clear()
    await feed.turn()
    assert {maker for maker, _ in feed.places} == set(NAMES)


async def test_proof_ends_a_maker_and_what_was_found_is_counted() -> None:
    feed = Peers()
    feed.on_trainer_message(READY)
    await feed.turn()
    unchecked = verdict(NAMES[2], 0, "gone").model_copy(update={"is_unchecked": True})
    feed.on_trainer_message(
        judged(verdict(NAMES[1], 0), verdict(NAMES[0], 0, "another token", is_proof=True), unchecked)
    )
    assert feed.lines == [f"no rollouts of {NAMES[0]} any more: group 0 of round 3: another token"]
    assert feed.makers[NAMES[0]] == MakerFigures(refused=1, reason="group 0 of round 3: another token")
    assert feed.makers[NAMES[1]] == MakerFigures(taken=1, reward=0.5)
    assert NAMES[2] not in feed.makers or not feed.makers[NAMES[2]].refused
    figures = feed.figures
    assert (figures.groups, figures.answers, figures.tokens, figures.reward, figures.length) == (1, 8, 24, 0.5, 3.0)
    assert figures.fates["skipped"] == figures.fates["unchecked"] == 1
    feed.on_trainer_message(RolloutsWanted(count=50))
    await feed.turn()
    assert NAMES[0] not in {maker for maker, _ in feed.places}


async def test_malformed_groups_end_their_maker_after_some() -> None:
    feed = Peers()
    feed.served, feed.answers = {NAMES[0]: 0, NAMES[1]: 0, NAMES[2]: 4}, 7
    feed.on_trainer_message(READY)
    for _ in range(4):
        await feed.turn()
    assert len(feed.lines) == 1
    assert "7 answers" in feed.lines[0]

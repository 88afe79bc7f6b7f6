"""What happens under a seed: a scenario, and faults at random times or at chosen phases of a round."""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from node.loop.actions import LoopAction, ReducePart
from protocol.consensus.events import Send, VoteRecord
from protocol.consensus.messages.contributions import Roster
from protocol.consensus.messages.signed import Digest
from protocol.consensus.topology import Groups, Pattern
from protocol.identity import PeerId
from tests.simulation.liars import LIARS
from tests.simulation.virtual.network import NAMES, Scenario
from tests.simulation.virtual.peers import SimulatedPeer
from tests.simulation.virtual.swarm import SimulatedSwarm

# Whole rounds take a few seconds; all faults are over by then, and whoever lives is to end all rounds by the end.
FAULTS_END = 25.0
END = 240.0
MARGIN = 2.0  # seconds: a heartbeat, and what is on its way, until those who were apart know of each other again
TRUSTED_SHARE = 0.3  # of the seeds
STRANDED_SECONDS = 2.0
PHASES = ("contribution", "roster", "holding", "inclusion", "part", "commit", "acknowledgement", "decision", "vow")
EXCHANGES: tuple[str, ...] = ("butterfly", "butterfly", "gather", "groups")
PATTERNS: tuple[Pattern, ...] = ("random", "random", "ring", "exponential")
KILLS = ("kill", "kill in phase", "kill in phase", "kill in phase", "kill reducer", "kill last holder", "relapse")
FAULTS = (*KILLS, "freeze", "split", "one way")
SIZE_CONFLICT = ("twin",)
ISOLATING_FAULTS = (*FAULTS, "split", "split", "split", "one way", "freeze")


PASSING_FAULTS = ("freeze", "split", "one way")


class InvariantError(AssertionError):
    """A seed under which something that must hold did not; its text says how to see it again."""


def scenario_of(seed: int) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    exchange = chance.choice(EXCHANGES)
    return Scenario(
        peers=chance.randint(3, 8),
        exchange=exchange,
        parts=chance.randint(1, 6) if exchange == "butterfly" else 1,
        rounds=3,
        loss=chance.choice([0.0, 0.02, 0.2]),
        duplication=chance.choice([0.0, 0.2]),
        delay=chance.choice([0.02, 0.2, 0.6]),
        transfer=chance.choice([0.05, 0.8]),
        training=chance.choice([0.5, 4.0]),
        group_size=chance.choice([2, 2, 3, 4]),
        pattern=chance.choice(PATTERNS),
        roster_quorum=chance.choice([1.0, 0.6]),
        disk=chance.choice([0.0, 0.05]),
        resubmits=chance.choice([True, False]),
        reducers_per_part=chance.choice([1, 2, 2]),
        strangers=random.Random(f"strangers {seed}").choice([0, 0, 1, 4]),
        trusted=random.Random(f"trusted {seed}").random() < TRUSTED_SHARE,
        machines_answer=random.Random(f"answers {seed}").random() < 0.5,
    )


def draw_liars(seed: int, peers: int, lies: Sequence[str]) -> dict[PeerId, type[SimulatedPeer]]:
    """Return fewer than a third of the peers as liars, with the kinds of their lies: half the time all the same."""
    if not lies:
        return {}
    chance = random.Random(f"liars {seed}")
    count = chance.randint(1, (peers - 1) // 3)
    kinds = [chance.choice(lies)] * count if chance.random() < 0.5 else chance.choices(lies, k=count)
    names = chance.sample(NAMES[:peers], count)
    return {name: LIARS[kind] for name, kind in zip(names, kinds, strict=True)}


class SeededRun:
    """One run. `faults`: of which kinds; as usual if empty. `isolating`: they may last longer than votes are
    remembered, so that forks are allowed; otherwise all peers together are away, apart or frozen for less than that.
    `lies`: of which kinds some peers lie, fewer than a third of all; nobody else dies then, because the dead count as
    liars do."""

    def __init__(
        self, seed: int, isolating: bool = False, faults: Sequence[str] = (), rounds: int = 3,
        lies: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.seed = seed
        self.fault = ""
        self._lies = [lie.replace(" ", "-") for lie in lies]
        self._faults = faults or (PASSING_FAULTS if lies else ISOLATING_FAULTS if isolating else FAULTS)
        self._end = END * max(1, rounds / 3)
        scenario = replace(scenario_of(seed), rounds=rounds)
        scenario = (
            replace(scenario, peers=max(4, scenario.peers), reducers_per_part=2, trusted=False) if lies else scenario
        )
        self.swarm = SimulatedSwarm(scenario, seed, isolating, draw_liars(seed, scenario.peers, lies))
        self.isolating = isolating
        self._chance = random.Random(f"faults {seed}")
        self._time_left = self.swarm.scenario.vote_memory - MARGIN
        self._plan()
        if self._faults in (FAULTS, ISOLATING_FAULTS):
            self.swarm.organiser.plan(seed)

    def _plan(self) -> None:
        for _ in range(self._chance.choice([0, 1, 1, 2, 3])):
            kind, number = self._chance.choice(self._faults), self._chance.randint(0, 2)
            if kind == "kill in phase":
                self._kill_in_phase(self._chance.choice(PHASES), number)
            elif kind == "kill reducer":
                self._on_first(lambda action: isinstance(action, ReducePart), number, self._kill)
            elif kind == "strand":
                self._strand(number)
            elif kind == "widow":
                self._widow(number)
            elif kind == "relapse":
                self._relapse(number)
            elif kind == "twin":
                self._twin()
            else:
                time = self._chance.uniform(0.0, FAULTS_END)
                self.swarm.network.schedule(time, lambda kind=kind: self._strike(kind))  # type: ignore[misc]

    def _strike(self, kind: str) -> None:
        names = [peer.name for peer in self.swarm.alive()]
        if not names:
            return
        victim = self._chance.choice(names)
        if kind == "kill":
            self._kill(victim)
        elif kind == "kill last holder":
            self._kill(self._last_holder(names) or victim)
        elif kind == "freeze":
            self.swarm.freeze(victim, self._seconds(0.5, 9.0))
        elif kind == "split":
            islands = self._chance.choice([2, 2, 3])
            self.swarm.split({name: self._chance.randrange(islands) for name in names}, self._seconds(0.0, 11.0))
        else:
            self._block(victim, names)

    def _seconds(self, least: float, most: float) -> float:
        """Of the time that is left for such things; far more where forks are allowed."""
        if self.isolating:
            return self._chance.uniform(least, 5 * most)
        seconds = min(self._chance.uniform(least, most), self._time_left)
        self._time_left -= seconds
        return seconds

    def _block(self, victim: PeerId, names: list[PeerId]) -> None:
        others = [name for name in names if name != victim and self._chance.random() < 0.7]
        inward = self._chance.random() < 0.5
        directions = {(name, victim) if inward else (victim, name) for name in others}
        self.swarm.block(directions, self._seconds(0.0, 11.0))

    def _kill(self, victim: PeerId, comes_back: bool | None = None) -> None:
        """For good, or for as long as it takes to start again. Somebody always lives."""
        dead = self.swarm.network.link.dead
        comes_back = self._chance.random() < 0.5 if comes_back is None else comes_back
        away = self._seconds(0.1, 8.0) if comes_back else None
        if victim not in dead and len(self.swarm.alive()) + len(self.swarm.returning) > 1:
            self.swarm.kill(victim, away)

    def _last_holder(self, names: Iterable[PeerId]) -> PeerId | None:
        """A peer without which something that was contributed to the open round is gone."""
        held: dict[bytes, list[PeerId]] = {}
        for name in names:
            for digest in self.swarm.peers[name].store:
                held.setdefault(digest, []).append(name)
        unique = sorted(holders[0] for holders in held.values() if len(holders) == 1)
        return self._chance.choice(unique) if unique else None

    def _kill_in_phase(self, kind: str, number: int) -> None:
        """Right before or after a peer says something of a kind for the first time in a round."""

        def strike(name: PeerId) -> None:
            if self._chance.random() < 0.5:
                self._kill(name)
            else:
                self.swarm.network.schedule(self._chance.uniform(0, 0.2), lambda: self._kill(name))

        self._on_first(lambda action: _kind_of(action) == kind, number, strike)

    def _widow(self, number: int) -> None:
        """Of two partners the one that still lacks the other's blob dies for a while, and the other over a proposal."""
        pairs: list[tuple[PeerId, PeerId]] = []
        blobs: dict[PeerId, Digest] = {}
        owner: list[PeerId] = []

        def watch(name: PeerId, action: LoopAction) -> None:
            if self.swarm.peers[name].chain.round != number:
                return
            if _kind_of(action) == "roster" and isinstance(action, Send) and not pairs:
                body = self.swarm.network.open(action.signed).body
                blobs.update({entry.sender: entry.body.parts[0].digest for entry in body.contributions})
                pairs.extend(self._pairs_apart_from(name, body))
            elif not owner and (pair := self._half_fetched(pairs, blobs)):
                owner.append(pair[0])
                self.swarm.kill(pair[1], self._seconds(6.0, 8.0))
            elif _kind_of(action) == "commit" and owner:
                self._kill(owner[0], comes_back=False)

        self.swarm.action_watchers.append(watch)

    def _pairs_apart_from(self, leader: PeerId, roster: Roster) -> list[tuple[PeerId, PeerId]]:
        topology = self.swarm.scenario.settings().topology
        if not isinstance(topology, Groups):
            return []
        partners = topology.partners(roster.round, tuple(entry.sender for entry in roster.contributions))
        pairs = ((peer, other) for peer, group in partners.items() for other in sorted(group))
        return [pair for pair in pairs if pair[0] != pair[1] and leader not in pair]

    def _half_fetched(
        self, pairs: list[tuple[PeerId, PeerId]], blobs: dict[PeerId, Digest]
    ) -> tuple[PeerId, PeerId] | None:
        """Return a pair of which the first has the other's blob, and the other lacks that of the first."""
        dead = self.swarm.network.link.dead
        for first, other in pairs:
            stores = self.swarm.peers[first].store, self.swarm.peers[other].store
            if blobs[other] in stores[0] and blobs[first] not in stores[1] and dead.isdisjoint((first, other)):
                return first, other
        return None

    def _strand(self, number: int) -> None:
        """A voter and two peers without the proposal outlive a decision, and are apart when the others are forgotten.

        Of the three, two are a quorum.
        """
        unheard: list[PeerId] = []

        def watch(leader: PeerId, action: LoopAction) -> None:
            if self.swarm.peers[leader].chain.round != number or self.swarm.network.link.dead:
                return
            alive = [peer.name for peer in self.swarm.alive() if peer.name != leader]
            if _kind_of(action) == "commit" and not unheard and len(alive) >= 4:
                unheard.extend(self._chance.sample(alive, 2))
                islands = {name: int(name in unheard) for name in (leader, *alive)}
                self.swarm.split(islands, STRANDED_SECONDS)
            elif _kind_of(action) == "decision" and unheard and isinstance(action, Send):
                voters = self.swarm.network.open(action.signed).body.by_sender.keys() - {leader, *unheard}
                if voters:
                    bound = self._chance.choice(sorted(voters))
                    for name in [leader, *alive]:
                        if name != bound and name not in unheard:
                            self._kill(name, comes_back=False)
                    self._split_later((bound,), tuple(unheard))

        self.swarm.action_watchers.append(watch)

    def _split_later(self, *groups: tuple[PeerId, ...]) -> None:
        """Part groups of peers until shortly after those that died now are forgotten."""
        scenario, seconds = self.swarm.scenario, self._seconds(9.0, 10.0)
        begins = scenario.expiry + scenario.vote_memory + MARGIN - seconds
        islands = {name: place for place, group in enumerate(groups) for name in group}
        self.swarm.network.schedule(begins, lambda: self.swarm.split(islands, seconds))

    def _relapse(self, number: int) -> None:
        """A leader dies over the decision, and some who acknowledged what it decided lose their memory."""

        def strike(leader: PeerId) -> None:
            voters = [peer.name for peer in self.swarm.alive() if peer.name != leader]
            self._kill(leader, comes_back=False)
            for name in self._chance.sample(voters, self._chance.randint(0, len(voters))):
                self.swarm.kill(name, self._chance.uniform(0.1, 1.0))

        self._on_first(lambda action: _kind_of(action) == "decision", number, strike)

    def _twin(self) -> None:
        """A peer offers what another has offered, with another size. In groups it harms its partners alone, who go on
        without it."""
        if self.swarm.scenario.exchange != "groups":
            self.swarm.conflicting_peer = self._chance.choice(list(self.swarm.peers))

    def _on_first(self, wanted: Callable[[LoopAction], bool], number: int, strike: Callable[[PeerId], None]) -> None:
        fired = False

        def watch(name: PeerId, action: LoopAction) -> None:
            nonlocal fired
            if not fired and wanted(action) and self.swarm.peers[name].chain.round == number:
                fired = True
                strike(name)

        self.swarm.action_watchers.append(watch)

    def run(self) -> None:
        """Raises BrokenError for whatever must not happen; `fault` says it, too."""
        try:
            self.swarm.start()
            self.swarm.network.run(self._end, self.swarm.is_done)
            self._check_end()
        except AssertionError as error:
            option = " --isolating" if self.isolating else " --lies " * bool(self._lies) + ",".join(self._lies)
            shown = f"python -m tests.simulation.replay {self.seed}{option}"
            self.fault = f"seed {self.seed}: {error}; to see it: {shown}"
            raise InvariantError(self.fault) from error
        except Exception as error:
            error.add_note(f"under seed {self.seed}")
            raise

    def _check_end(self) -> None:
        alive = self.swarm.alive()
        for peer in alive:
            place = f"round {peer.chain.round}, view {peer.loop.session.machine and peer.loop.session.machine.view}"
            assert peer.chain.round >= self.swarm.scenario.rounds, f"{peer.name[-4:]} is stuck in {place}"
        assert self.swarm.is_on_one_chain() or not self.swarm.double_decisions.places, (
            "two decisions of liars do not heal"
        )
        assert self.swarm.is_done(), (
            "the chains differ" if self.isolating else "the authors of two decisions are unknown"
        )
        guilty = {*self.swarm.liars, self.swarm.conflicting_peer}
        for peer in alive:
            assert peer.loop.conduct.excluded <= guilty, "an honest peer is excluded"
            peer.progress.check_nothing_twice(peer.chain)
            peer.progress.check_nothing_lost(peer.chain)

    def print_trace(self) -> None:
        sys.stdout.write(f"seed {self.seed}: {self.swarm.scenario}\n")
        for time, peer, what in self.swarm.network.trace:
            sys.stdout.write(f"{time:9.3f} {peer[-4:]:>7} {_short(what)}\n")


def _kind_of(action: LoopAction) -> str:
    """Of a statement that is sent, or "vow"."""
    if isinstance(action, Send):
        return action.signed.kind
    return "vow" if isinstance(action, VoteRecord) else ""


def _short(what: object) -> str:
    if isinstance(what, Send):
        return f"Send {what.signed.kind} to {','.join(peer[-4:] for peer in what.peers)}"
    text = str(what)
    return text if len(text) < 300 else text[:300] + "..."

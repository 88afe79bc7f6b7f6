"""What happens under a seed: a scenario, and faults at random times or at chosen phases of a round."""

import random
from collections.abc import Iterator

from protocol.identity import PeerId
from protocol.rounds.events import Action, Exchange, Finish, Pattern, Reduce, Send
from tests.simulation.network import Scenario
from tests.simulation.peers import Swarm

# Whole rounds take a few seconds; all faults are over by then, and whoever lives is to end all rounds by the end.
FAULTS_OVER = 25.0
END = 240.0
PHASES = ("contribution", "roster", "holding", "inclusion", "part", "commit", "acknowledgement", "decision")
EXCHANGES: tuple[Exchange, ...] = ("butterfly", "butterfly", "gather", "groups")
PATTERNS: tuple[Pattern, ...] = ("random", "random", "ring", "exponential")


class BrokenError(AssertionError):
    """A seed under which something that must hold did not; `python -m tests.simulation.replay SEED` shows it."""


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
    )


class Story:
    """One run. `isolating`: faults may last longer than votes are remembered, so that forks are allowed."""

    def __init__(self, seed: int, isolating: bool = False) -> None:
        self.seed = seed
        self.swarm = Swarm(scenario_of(seed), seed)
        self.isolating = isolating
        self._chance = random.Random(f"faults {seed}")
        self._apart_left = self.swarm.scenario.vote_memory - 1.0
        self._plan()

    def _plan(self) -> None:
        kinds = ["kill", "kill in phase", "kill in phase", "kill reducer", "freeze", "split"]
        kinds += ["return", "return"] if self.isolating else []  # whoever comes back has forgotten its promises
        for _ in range(self._chance.choice([0, 1, 1, 2, 3])):
            kind = self._chance.choice(kinds)
            if kind == "kill in phase":
                self._kill_in_phase(self._chance.choice(PHASES), self._chance.randint(0, 2))
            elif kind == "kill reducer":
                self._kill_reducer(self._chance.randint(0, 2))
            else:
                time = self._chance.uniform(0.0, FAULTS_OVER)
                self.swarm.network.schedule(time, lambda kind=kind: self._strike(kind))  # type: ignore[misc]

    def _strike(self, kind: str) -> None:
        names = [peer.name for peer in self.swarm.alive()]
        victim = self._chance.choice(names)
        if kind in ("kill", "return"):
            self._kill(victim)
            if kind == "return" and victim in self.swarm.network.link.dead:
                self._return_of(victim)
        elif kind == "freeze":
            self.swarm.freeze(victim, self._chance.uniform(0.5, 9.0))
        else:
            self._split(names)

    def _split(self, names: list[PeerId]) -> None:
        """Nothing may fork while peers are apart for less time, all splits together, than votes are remembered."""
        seconds = self._chance.uniform(30.0, 60.0) if self.isolating else self._chance.uniform(0.0, self._apart_left)
        self._apart_left -= seconds
        self.swarm.split({name: self._chance.randint(0, 1) for name in names}, seconds)

    def _kill(self, victim: PeerId) -> None:
        if len(self.swarm.alive()) > 1 and victim not in self.swarm.network.link.dead:
            self.swarm.kill(victim)

    def _return_of(self, victim: PeerId) -> None:
        """As a new process; the ways to it may take longer to be found again than the ways from it."""
        away, deaf = self._chance.uniform(1.0, 12.0), self._chance.choice([0.0, 0.0, 8.0, 20.0])
        self.swarm.network.schedule(away, lambda: self.swarm.bring_back(victim, deaf))

    def _kill_in_phase(self, kind: str, number: int) -> None:
        """Right before or after a peer sends its first statement of a kind in a round."""
        before = self._chance.random() < 0.5
        fired = False

        def watch(name: PeerId, action: Action) -> None:
            nonlocal fired
            if fired or not isinstance(action, Send) or action.signed.kind != kind:
                return
            if self.swarm.peers[name].chain.round == number:
                fired = True
                if before:
                    self._kill(name)
                else:
                    self.swarm.network.schedule(self._chance.uniform(0, 0.2), lambda: self._kill(name))

        self.swarm.watches.append(watch)

    def _kill_reducer(self, number: int) -> None:
        fired = False

        def watch(name: PeerId, action: Action) -> None:
            nonlocal fired
            if not fired and isinstance(action, Reduce) and self.swarm.peers[name].chain.round == number:
                fired = True
                self._kill(name)

        self.swarm.watches.append(watch)

    def run(self) -> None:
        """Raises BrokenError for whatever must not happen."""
        try:
            if not self.isolating:
                self.swarm.checks.append(self._nobody_forks)
            self.swarm.start()
            self.swarm.network.run(END, self.swarm.is_one_chain if self.isolating else self.swarm.is_done)
            for fault in self._faults():
                raise AssertionError(fault)
        except AssertionError as error:
            raise BrokenError(f"seed {self.seed}: {error}") from error

    def _nobody_forks(self) -> None:
        assert not self.swarm.forks(), "two commits of one round"

    def _faults(self) -> Iterator[str]:
        alive = self.swarm.alive()
        for peer in alive:
            if peer.chain.round < self.swarm.scenario.rounds:
                yield f"{peer.name[-4:]} is stuck in round {peer.chain.round}, view {peer.round.view}"
        if len({peer.chain.head for peer in alive}) > 1:
            yield "the chains differ"
        yield from self._unknown_fates()

    def _unknown_fates(self) -> Iterator[str]:
        """Whoever ended a round by its own machine knows the commit, so whether its contribution is in it."""
        for peer in self.swarm.alive():
            for action in (what for _, name, what in self.swarm.network.trace if name == peer.name):
                if isinstance(action, Finish):
                    included = {entry.sender for entry in action.commit.body.contributions}
                    offers = [o for n, o in self.swarm.offered if n == peer.name and o.base == action.commit.body.base]
                    skipped = {(p, r) for n, p, r in self.swarm.skips if n == peer.name}
                    if offers and peer.name not in included and (peer.name, "left out") not in skipped:
                        yield f"{peer.name[-4:]} does not know what became of its contribution"

    def print_trace(self) -> None:
        print(f"seed {self.seed}: {self.swarm.scenario}")
        for time, peer, what in self.swarm.network.trace:
            print(f"{time:9.3f} {peer[-4:]:>7} {_short(what)}")


def _short(what: object) -> str:
    if isinstance(what, Send):
        return f"Send {what.signed.kind} to {','.join(peer[-4:] for peer in what.peers)}"
    text = str(what)
    return text if len(text) < 300 else text[:300] + "..."

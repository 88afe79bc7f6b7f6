"""Attack 10: a leader that proposes two commits and votes for both, so that different peers decide different rounds."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import Acknowledgement, CommitCertificate
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from tests.hostile.patches import replaced
from tests.hostile.switches import Switches

NAME = "two-decisions"
PATIENCE = 0.1  # seconds for the votes of both halves; then the leader is content with one


@dataclass
class Split:
    """The two proposals of one view, and the peers that get the second one."""

    first: SignedMessage[Commit]
    second: SignedMessage[Commit]
    others: frozenset[PeerId]
    since: float
    is_done: bool = False


class Equivocator:
    """Splits the peers of each round that this node leads."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches
        self._split: Split | None = None
        replaced(RoundMachine, "_send", self._send)
        replaced(RoundMachine, "_decide", self._decide)

    def _send(self, original: Any, machine: RoundMachine, peers: Iterable[PeerId], message: SignedMessage[Any]) -> None:
        chosen, body = frozenset(peers), message.body
        own = message.sender == machine._state.me
        if own and isinstance(body, Commit) and self._switches.is_on(NAME):
            split = self._split_for(machine, message)
            self._switches.note_use(NAME)
            original(machine, chosen & split.others, split.second)
            original(machine, chosen - split.others, split.first)
        elif own and isinstance(body, CommitCertificate) and self._split is not None and self._split.is_done:
            is_second = body.proposal == self._split.second.digest
            original(machine, chosen & self._split.others if is_second else chosen - self._split.others, message)
        else:
            original(machine, chosen, message)

    def _split_for(self, machine: RoundMachine, commit: SignedMessage[Commit]) -> Split:
        if self._split is None or self._split.first.digest != commit.digest:
            body = replace(commit.body, contributions=commit.body.contributions[1:] or commit.body.contributions)
            second = machine._sign(body)
            machine._knowledge.learn_proposal(second)
            voters = sorted(machine._state.voter_set.voters - {machine._state.me})
            self._split = Split(commit, second, frozenset(voters[:1]), time.monotonic())
        return self._split

    def _decide(self, original: Any, machine: RoundMachine) -> None:
        split = self._split
        is_open = split is not None and not split.is_done and split.first.body.round == machine.number
        if split is not None and is_open and machine.commit is None and not self._vote_twice(machine, split):
            return
        original(machine)

    def _vote_twice(self, machine: RoundMachine, split: Split) -> bool:
        """Acknowledge the second proposal too; once both have a quorum, show each half its own certificate."""
        knowledge, me = machine._knowledge, machine._state.me
        votes = knowledge.acknowledgements.get(split.second.digest, {})
        first = knowledge.acknowledgements.get(split.first.digest, {}).get(me)
        if first is not None and me not in votes:
            vote = Acknowledgement.of(split.second, first.body.basis)
            knowledge.learn_acknowledgement(machine._sign(vote))
        quorums = [
            machine._state.voter_set.is_quorum(knowledge.acknowledgements.get(proposal.digest, {}))
            for proposal in (split.first, split.second)
        ]
        if all(quorums):
            split.is_done = True
            machine._send(split.others, machine._certificate_for(split.second))
        return split.is_done or time.monotonic() > split.since + PATIENCE

"""Audit results of microbatches: other servers of the stage compute them again, before anybody uses them. PURE.

In exact steps all servers of a stage have the same weights, so two of one kind of device compute the same bits. An
owner draws a share of its passes after it has their results, and lets a second server repeat each as a replay, which
takes no place in a step and adds nothing. A difference lets the panel grow, from 2 to 3, then 9, then all servers with
standing: most of a panel decide which servers the owner avoids, and the signed results of two thirds of the voters
exclude a key for everybody (`protocol.pipeline.results`). A server that lies and an auditor that lies are found alike.

A server that reports another chain, other inputs or another kind of device than the audited one says nothing about its
result. One whose chain or inputs differ from those of most of the panel is of no use for the step, so the owner avoids
it too, but it is guilty of nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.identity import PeerId
from protocol.pipeline.messages import Task
from protocol.pipeline.results import ResultValue, SignedResult, StageQuestion

PANELS = (2, 3, 9)  # results, that of the audited server included; then all servers
AUDIT_SECONDS = 20.0
Verdict = Literal[
    "equal",  # the results that can be compared are alike
    "different",  # most of a panel contradict others
    "undecided",  # two results differ, and nobody else can compute them
    "unanswered",  # no other server has computed it
]


class _Vote(NamedTuple):
    question: StageQuestion
    value: ResultValue


@dataclass(frozen=True)
class AuditEnd:
    """The end of an audit. `wrong`: the servers that most contradict; `results`: all of them, as evidence."""

    verdict: Verdict
    wrong: frozenset[PeerId] = frozenset()
    results: tuple[SignedResult, ...] = ()


@dataclass
class ResultAudit:
    """The audit of one result.

    Args:
        first: the result that is audited.
        task: the request to the other servers, without an attempt of its own.
        candidates: the other servers with standing, in the order in which they are asked.
        deadline: when the audit ends with the results that are known.
    """

    first: SignedResult
    task: Task
    candidates: Sequence[PeerId]
    deadline: float
    results: dict[PeerId, SignedResult] = field(default_factory=dict)
    asked: dict[PeerId, int] = field(default_factory=dict)  # attempts, of servers that may still answer
    _used: int = 0  # candidates that were asked

    def __post_init__(self) -> None:
        self.results[self.first.maker] = self.first

    def expects(self, peer: PeerId) -> bool:
        """Return whether a server may still answer."""
        return peer in self.asked

    def add(self, result: SignedResult) -> None:
        """Take the result of a server that was asked."""
        self.asked.pop(result.maker, None)
        self.results[result.maker] = result

    def give_up(self, peer: PeerId) -> None:
        """Note that a server does not answer."""
        self.asked.pop(peer, None)

    def next_peers(self) -> list[PeerId]:
        """Return the servers to ask now, and count them as asked."""
        votes = self._votes()
        size = len(votes) + len(self.asked)
        wanted = PANELS[0]
        if len(set(votes.values())) > 1:
            wanted = next((panel for panel in PANELS if panel > len(votes)), 1 + len(self.candidates))
        peers = list(self.candidates[self._used : self._used + max(0, wanted - size)])
        self._used += len(peers)
        return peers

    @property
    def is_over(self) -> bool:
        """Return whether no further answer can come; call it after `next_peers`."""
        return not self.asked

    def end(self) -> AuditEnd:
        """Return the end of the audit by the results that are here."""
        votes = self._votes()
        if len(votes) < PANELS[0]:
            return AuditEnd("unanswered")
        counts = Counter(votes.values())
        if len(counts) == 1:
            return AuditEnd("equal")
        vote, most = counts.most_common(1)[0]
        if 2 * most <= len(votes):
            return AuditEnd("undecided", results=tuple(self.results.values()))
        wrong = frozenset(peer for peer, other in votes.items() if other != vote)
        return AuditEnd("different", wrong, tuple(self.results.values()))

    def _votes(self) -> dict[PeerId, _Vote]:
        """Return the results of servers whose devices are of the same kind as that of the audited one."""
        kind = self.first.body.question.kind
        return {
            peer: _Vote(each.body.question, each.body.value)
            for peer, each in self.results.items()
            if each.body.question.kind == kind
        }

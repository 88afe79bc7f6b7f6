"""Drives the pure round machine (protocol.round) on the real network: one round after the other.

The machine decides; this class carries out. Statements come in through the Rounds service and as replies, blobs
through the fetcher, arithmetic through a worker thread; each result goes back into the machine as an event.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.replica import Work, Workshop
from node.wishes import Wishes
from protocol.blob_store import BlobStore
from protocol.blobs import Blob
from protocol.errors import MalformedError, PeerFault, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import Signed
from protocol.records import sign
from protocol.round import Round
from protocol.round_events import (
    Action,
    Event,
    Fetch,
    Finish,
    Held,
    Live,
    Offered,
    Received,
    Reduce,
    Reduced,
    RoundSettings,
    Send,
    Skip,
    Tick,
)
from protocol.statements import Commit, Contribution, Digest, Part, Roster, Statement, Terms, parse

logger = logging.getLogger(__name__)

MAX_EARLY = 1024  # statements of the round after ours that are kept
KEPT_DECISIONS = 4
EARLY_ROUNDS = 1


@dataclass
class Hooks:
    """What the driver needs of its surroundings, and whom it tells."""

    send: Callable[[Iterable[PeerId], Signed], None]
    work: Work
    members: Callable[[], Live]
    refused: Callable[[PeerId, PeerFault], None]
    skipped: Callable[[PeerId | None, str], None]
    decided: Callable[[Statement[Commit]], None]


class RoundDriver:
    """Between `begin` and the call of `hooks.decided` there is a machine; `decided` is called once a round."""

    def __init__(
        self, identity: Identity, settings: RoundSettings, terms: Terms, store: BlobStore, workshop: Workshop,
        wishes: Wishes, hooks: Hooks,
    ) -> None:  # fmt: skip
        self._identity, self._settings, self._terms = identity, settings, terms
        self._store, self._workshop, self._wishes, self._hooks = store, workshop, wishes, hooks
        self._machine: Round | None = None
        self._number = -1
        self._base: Digest = b""
        self._seen: Mapping[PeerId, float] | None = None
        self._early: deque[Statement[Any]] = deque(maxlen=MAX_EARLY)
        self._decisions: dict[int, tuple[Signed, ...]] = {}
        self._parts: dict[Digest, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def number(self) -> int:
        """Of the round that is open, or was last."""
        return self._number

    @property
    def is_open(self) -> bool:
        return self._machine is not None and self._machine.commit is None

    def begin(self, number: int, base: Digest, now_live: Iterable[PeerId]) -> None:
        """Open a round. `now_live`: every live trainer of the run, whatever its round."""
        now = _now()
        seen = self._seen if self._seen is not None else dict.fromkeys(now_live, now)
        self._number, self._base = number, base
        self._parts.clear()
        self._machine = Round(
            self._settings, self._identity.peer_id, number, base, self._sign, now, seen
        )
        self.members_changed()
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for statement in early:
            self.receive(statement)

    def close(self) -> None:
        """Give the open round up: this peer has moved to another chain, or stops."""
        self._end()
        self._early.clear()

    def offer(self, contribution: Contribution) -> None:
        """Our own message for the open round; its blobs are in the store."""
        self._feed(Offered(contribution))

    def members_changed(self) -> None:
        if self.is_open:
            self._feed(self._hooks.members())

    def take(self, sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        """Statements that `sender` brought (not all need be its own); returns what it seems to lack."""
        answers: dict[int, tuple[Signed, ...]] = {}
        for signed in envelopes:
            try:
                statement = parse(signed, self._settings.run_id, self._terms)
            except PeerFault as fault:
                self._hooks.refused(sender, fault)
                continue
            number = statement.body.round
            if number in self._decisions and not isinstance(statement.body, Commit):
                answers[number] = self._decisions[number]
            self.receive(statement)
        return [signed for decision in answers.values() for signed in decision]

    def receive(self, statement: Statement[Any]) -> None:
        """A checked statement; those of the next round wait for it, others that are not of this round are dropped."""
        number = statement.body.round
        if number == self._number and self.is_open:
            self._index(statement)
            self._feed(Received(statement))
        elif self._number < number <= self._number + EARLY_ROUNDS:
            self._early.append(statement)

    def _feed(self, event: Event) -> None:
        machine = self._machine
        if machine is None:
            return
        decided = machine.commit is not None
        for action in machine.handle(event, _now()):
            self._carry_out(action)
        if machine is self._machine and not decided:
            self._set_timer()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(peers, signed):
                self._hooks.send(peers, signed)
            case Fetch(blob, sources):
                self._fetch(blob, sources)
            case Reduce():
                self._spawn(self._reduce(action))
            case Finish(commit):
                self._finish(commit)
            case Skip(peer, reason):
                self._hooks.skipped(peer, reason)

    def _fetch(self, blob: Blob, sources: Sequence[PeerId]) -> None:
        if self._wishes.want(blob, sources):
            self._spawn(self._get(blob, self._number))

    async def _get(self, blob: Blob, number: int) -> None:
        """Until it is here or the round is over (which cancels this)."""
        try:
            while not await self._arrived(blob):
                logger.info("round %d still wants blob %s", number, blob.name[:12])
            await self._hooks.work(self._workshop.check, blob, self._parts.get(blob.digest, 0))
        except MalformedError as error:
            logger.warning("round %d goes on here without blob %s: %s", number, blob.name[:12], error)
            return
        finally:
            self._wishes.drop(blob)
        if number == self._number:
            self._feed(Held(blob.digest))

    async def _arrived(self, blob: Blob) -> bool:
        try:
            await self._wishes.get(blob, self._settings.exchange_timeout)
        except UnreachableError:
            return False
        return True

    async def _reduce(self, order: Reduce) -> None:
        number = self._number
        blobs = [contribution.body.parts[order.part] for contribution in order.contributions]
        tokens = [contribution.body.tokens for contribution in order.contributions]
        try:
            blob = await self._hooks.work(self._workshop.reduce, order.part, blobs, tokens)
        except (MalformedError, OSError) as error:
            logger.warning("part %d of round %d cannot be reduced here: %s", order.part, number, error)
            return
        if number == self._number:
            self._feed(Reduced(order.part, order.attempt, blob))

    def _finish(self, commit: Statement[Commit]) -> None:
        machine = self._machine
        assert machine is not None
        self._seen = machine.seen
        self._decisions[self._number] = machine.decision
        while len(self._decisions) > KEPT_DECISIONS:
            del self._decisions[min(self._decisions)]
        self._end()
        self._hooks.decided(commit)

    def _end(self) -> None:
        self._machine = None
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline(_now()) if self._machine is not None else None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._feed, Tick())

    def _index(self, statement: Statement[Any]) -> None:
        """Remember which part of the model each blob holds, for the check of its content."""
        body = statement.body
        match body:
            case Contribution():
                self._parts.update((blob.digest, part) for part, blob in enumerate(body.parts))
            case Roster() | Commit():
                for contribution in body.contributions:
                    self._index(contribution)
            case Part():
                self._parts[body.blob.digest] = body.part

    def _sign(self, kind: str, body: Any) -> Signed:
        return sign(self._identity, kind, self._settings.run_id, body)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _now() -> float:
    return asyncio.get_running_loop().time()


"""A node that trains with the others, and lies in its own messages while a switch is on.

All lies are told where the round machine signs or sends a message of this node, so each of them is signed by its key.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from node.daemon.state.outer_state import RoundCompute
from optim.exchange import ContributionEncoder
from protocol.blobs.blob import Blob
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit, Contribution, PartBlob, Roster, enumerate_parts
from protocol.consensus.messages.kinds import ReducedPart
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.signing import sign
from tests.hostile.patches import replaced
from tests.hostile.switches import Switches

NOISE = 0.5  # of a value; an honest update has about 0.003
HUGE = 1e9
CLAIMED_TOKENS = 1 << 40
FRESH_KEYS = 5
SENT_TWICE = "two-contributions"
Lie = Callable[["Liar", RoundMachine, Any], Any]  # an honest body, and the one to sign instead


class Liar:
    """What the lies of this process need: the store and the planner of its node, and random numbers."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self._compute: RoundCompute | None = None
        self._random = np.random.default_rng()
        self._sums: dict[tuple[bytes, int], Blob] = {}  # the noise by inputs and part
        self._keys = [Identity.create() for _ in range(FRESH_KEYS)]
        replaced(RoundCompute, "__init__", self._learn_compute)
        replaced(RoundMachine, "_sign", self._sign)
        replaced(RoundMachine, "_send", self._send)

    def _learn_compute(self, original: Any, compute: RoundCompute, *arguments: Any) -> None:
        original(compute, *arguments)
        self._compute = compute

    def _sign(self, original: Any, machine: RoundMachine, body: Any) -> Any:
        for name, (kind, lie) in LIES.items():
            if isinstance(body, kind) and self.switches.is_on(name):
                told = lie(self, machine, body)
                if told != body:
                    self.switches.note_use(name)
                body = told
        return original(machine, body)

    def _send(self, original: Any, machine: RoundMachine, peers: Iterable[str], message: SignedMessage[Any]) -> None:
        """Send another version of some messages to half of the peers."""
        chosen = sorted(peers)
        if message.sender == machine._state.me and self.switches.is_on(SENT_TWICE):
            twin = _twin(machine, message)
            if twin is not None:
                self.switches.note_use(SENT_TWICE)
                original(machine, chosen[::2], twin)
                chosen = chosen[1::2]
        original(machine, chosen, message)

    def noise(self, round_number: int, scale: float) -> list[Blob]:
        """Return the parts of a random message, which this node serves."""
        assert self._compute is not None
        planner, store = self._compute._planner, self._compute._store
        numel = planner.signal_numel
        noise = torch.from_numpy(self._random.standard_normal(numel, dtype=np.float32) * np.float32(scale))
        payloads = ContributionEncoder(planner).encode(round_number, noise, torch.zeros(numel))
        return [store.put_in_memory(bytes(payload)) for payload in payloads]

    def same_noise(self, part: ReducedPart) -> Blob:
        """Return noise as a sum, the same for the same inputs: two sums of them would be a proof."""
        place = part.inputs, part.part
        if place not in self._sums:
            self._sums[place] = self.noise(part.round, NOISE)[part.part]
        return self._sums[place]

    def fresh_contributions(self, machine: RoundMachine, like: Contribution) -> list[SignedMessage[Contribution]]:
        """Return contributions that keys which nobody has seen made of this node's own."""
        run_id = machine._state.settings.run_id
        return [
            SignedMessage.of(sign(key, "contribution", run_id, like.to_wire()), like) for key in self._keys
        ]  # fmt: skip


def _hold(machine: RoundMachine, parts: Sequence[Blob]) -> tuple[Blob, ...]:
    """Let this node believe that it holds blobs, as it does of those that it made."""
    machine._knowledge.add_held_parts(enumerate_parts(parts))
    return tuple(parts)


def _ghost(blob: Blob) -> Blob:
    """Return a blob of the same size that nobody has; always the same one, as two statements would be a proof."""
    return Blob(hashlib.sha256(blob.digest).digest(), blob.size)


def _invent_sums(liar: Liar, machine: RoundMachine, commit: Commit) -> Commit:
    """Attack 3: list the true contributions, and make up the sums."""
    return replace(commit, parts=_hold(machine, liar.noise(commit.round, NOISE)))


def _invent_contributors(liar: Liar, machine: RoundMachine, commit: Commit) -> Commit:
    """Attack 4: include contributions of keys that nobody has seen, with sums that fit them."""
    parts = liar.noise(commit.round, NOISE)
    invented = liar.fresh_contributions(machine, replace(commit.contributions[0].body, parts=tuple(parts)))
    both = sorted([*commit.contributions, *invented], key=lambda entry: entry.sender)
    sums = _hold(machine, parts) if commit.parts else ()
    return replace(commit, contributions=tuple(both), parts=sums)


def _lie_in_part(liar: Liar, machine: RoundMachine, part: ReducedPart) -> ReducedPart:
    """Attack 5: announce noise as the sum of a part."""
    blob = liar.same_noise(part)
    machine._knowledge.add_held_parts([PartBlob(blob, part.part)])
    return replace(part, blob=blob)


def _ghost_part(liar: Liar, machine: RoundMachine, part: ReducedPart) -> ReducedPart:
    """Attack 7: announce a sum that nobody can fetch."""
    blob = _ghost(part.blob)
    machine._knowledge.add_held_parts([PartBlob(blob, part.part)])
    return replace(part, blob=blob)


def _claim_tokens(liar: Liar, machine: RoundMachine, body: Contribution) -> Contribution:
    """Attack 6: claim so many tokens that a small random message is the mean."""
    parts = _hold(machine, liar.noise(body.round, 0.02))
    return replace(body, tokens=CLAIMED_TOKENS, parts=parts)


def _enlarge(liar: Liar, machine: RoundMachine, body: Contribution) -> Contribution:
    """Attack 6c: send a message a milliard times as large."""
    return replace(body, parts=_hold(machine, liar.noise(body.round, HUGE)))


def _ghost_contribution(liar: Liar, machine: RoundMachine, body: Contribution) -> Contribution:
    """Attack 12: name a message that is never there."""
    return replace(body, parts=_hold(machine, [_ghost(blob) for blob in body.parts]))


def _garble(liar: Liar, machine: RoundMachine, body: Contribution) -> Contribution:
    """Attack 12: send bytes that do not decode."""
    assert liar._compute is not None
    store = liar._compute._store
    return replace(body, parts=_hold(machine, [store.put_in_memory(b"\xff" * blob.size) for blob in body.parts]))


def _drop_others(liar: Liar, machine: RoundMachine, roster: Roster) -> Roster:
    """Attack 16: list no contribution but the own one."""
    own = tuple(entry for entry in roster.contributions if entry.sender == machine._state.me)
    return replace(roster, contributions=own) if own else roster


def _twin(machine: RoundMachine, message: SignedMessage[Any]) -> SignedMessage[Any] | None:
    """Attack 17: another contribution, or another roster, of the same round and view."""
    body = message.body
    if isinstance(body, Contribution):
        other: Any = replace(body, loss=body.loss + 1)
    elif isinstance(body, Roster) and len(body.contributions) > 1:
        other = replace(body, contributions=body.contributions[:-1])
    else:
        return None
    kind = message.signed.kind
    return SignedMessage.of(machine._signer(kind, other.to_wire()), other)


LIES: dict[str, tuple[type[Any], Lie]] = {
    "invented-sums": (Commit, _invent_sums),
    "invented-contributors": (Commit, _invent_contributors),
    "lying-reducer": (ReducedPart, _lie_in_part),
    "ghost-sum": (ReducedPart, _ghost_part),
    "token-claim": (Contribution, _claim_tokens),
    "huge-message": (Contribution, _enlarge),
    "ghost-contribution": (Contribution, _ghost_contribution),
    "garbled-contribution": (Contribution, _garble),
    "leader-drops-others": (Roster, _drop_others),
}

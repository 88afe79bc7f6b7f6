"""Announce the states that a node keeps, in its peer record: that of the whole run, or those of stages."""

from typing import Protocol

from protocol.consensus.history.chain import ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.membership.records.kept_states import MAX_KEPT_STATES, KeptState, encode_kept_states
from protocol.membership.records.served_stages import records_by_stage

Voters = frozenset[PeerId]


class StateAnnouncer(Protocol):
    """Shows one kept state to the peers of the run."""

    def announce(self, head: ChainHead, state: Digest, voters: Voters) -> None:
        """Announce a head and its state; an empty digest means that the state is not held."""


class WholeRunAnnouncer:
    """Announces the state of a run that is not cut, in the fields in which a trainer announces its own."""

    def __init__(self, directory: PeerDirectory) -> None:
        self._directory = directory

    def announce(self, head: ChainHead, state: Digest, voters: Voters) -> None:
        self._directory.set_voters(voters)
        self._directory.publish(
            urgent=True, round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state
        )


class KeptBoard:
    """The states of stages that a node keeps, as its record lists them.

    A record has room for few. A host of more stages lists those with the fewest live trainers, which newcomers need.

    Args:
        directory: the peers of the run.
        is_host: whether the node trains no stage, so that the voters of the kept ones are all that it knows.
        is_public: whether others may fetch the states; a node that is about to leave does not offer its own.
    """

    def __init__(self, directory: PeerDirectory, *, is_host: bool, is_public: bool = True) -> None:
        self._directory = directory
        self._is_host = is_host
        self._is_public = is_public
        self._states: dict[int, KeptState] = {}
        self._voters: dict[int, Voters] = {}
        self._published = b""

    def announce(self, stage: int, head: ChainHead, state: Digest, voters: Voters) -> None:
        """Announce the state of a stage."""
        self._states[stage] = KeptState(stage, head.round, head.digest, head.tokens, state)
        self._voters[stage] = voters
        if self._is_host:
            self._directory.set_voters(frozenset().union(*self._voters.values()))
        self.refresh()

    def withdraw(self, stage: int) -> None:
        """Announce a stage no longer."""
        self._states.pop(stage, None)
        self._voters.pop(stage, None)
        self.refresh()

    def refresh(self) -> None:
        """Publish the list if it has changed; which stages need it most depends on the live peers."""
        listed = encode_kept_states(self._most_needed())
        if self._is_public and listed != self._published:
            self._published = listed
            self._directory.publish(urgent=True, kept=listed)

    def _most_needed(self) -> list[KeptState]:
        if len(self._states) <= MAX_KEPT_STATES:
            return list(self._states.values())
        trainers = [record for record in self._directory.live().values() if record.role == "trainer"]
        served = [seen.stage - 1 for record in trainers for seen in records_by_stage(record)]
        return sorted(self._states.values(), key=lambda kept: (served.count(kept.stage), kept.stage))[:MAX_KEPT_STATES]


class StageAnnouncer:
    """Announces the state of one stage on the board of its node."""

    def __init__(self, board: KeptBoard, stage: int) -> None:
        self._board = board
        self._stage = stage

    def announce(self, head: ChainHead, state: Digest, voters: Voters) -> None:
        if head.digest:
            self._board.announce(self._stage, head, state, voters)
        else:  # the state is not held although it could be
            self._board.withdraw(self._stage)

"""Announce the stored states of a node in its peer record: the state of the whole run, or the states of stages."""

from typing import Protocol

from node.daemon.peers.admitted_peers import AdmittedPeers
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.membership.record_fields import MAX_KEPT_STATES, KeptState, encode_kept_states, records_by_stage

Voters = frozenset[PeerId]


class StateAnnouncer(Protocol):
    """Announces one stored state to the peers of the run."""

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


class StoredStageList:
    """The list of stored stage states in a node's record.

    A record holds few entries. A host with more stages lists the ones with the fewest live trainers, because newcomers
    need them most.

    Args:
        admitted: the peers of the run.
        is_host: whether the node trains no stage, and so knows only the voters of the stored ones.
        is_public: whether other peers may fetch the states; a node that is about to leave does not offer them.
    """

    def __init__(self, admitted: AdmittedPeers, *, is_host: bool, is_public: bool = True) -> None:
        self._admitted = admitted
        self._directory = admitted.directory
        self._is_host = is_host
        self._is_public = is_public
        self._states: dict[int, KeptState] = {}
        self._voters: dict[int, Voters] = {}
        self._published = b""

    def announce(self, stage: int, head: ChainHead, state: Digest, voters: Voters) -> None:
        self._states[stage] = KeptState(stage, head.round, head.digest, head.tokens, state)
        self._voters[stage] = voters
        if self._is_host:
            self._directory.set_voters(frozenset().union(*self._voters.values()))
        self.refresh()

    def withdraw(self, stage: int) -> None:
        """Stop announcing a stage."""
        self._states.pop(stage, None)
        self._voters.pop(stage, None)
        self.refresh()

    def refresh(self) -> None:
        """Publish the list if it has changed, for example because trainers have left."""
        listed = encode_kept_states(self._most_needed())
        if self._is_public and listed != self._published:
            self._published = listed
            self._directory.publish(urgent=True, kept=listed)

    def _most_needed(self) -> list[KeptState]:
        if len(self._states) <= MAX_KEPT_STATES:
            return list(self._states.values())
        trainers = [record for record in self._admitted.records().values() if record.role == "trainer"]
        served = [seen.stage - 1 for record in trainers for seen in records_by_stage(record)]
        return sorted(self._states.values(), key=lambda kept: (served.count(kept.stage), kept.stage))[:MAX_KEPT_STATES]


class StageAnnouncer:
    """Announces the state of one stage in the list of its node."""

    def __init__(self, stage_list: StoredStageList, stage: int) -> None:
        self._stage_list = stage_list
        self._stage = stage

    def announce(self, head: ChainHead, state: Digest, voters: Voters) -> None:
        if head.digest:
            self._stage_list.announce(self._stage, head, state, voters)
        else:  # the state is not held although it could be
            self._stage_list.withdraw(self._stage)

"""Show who counts: the live peers that the run admits, and those of them that have standing.

A record costs nothing, so a record alone decides nothing: every part of the node that lets records decide something
reads them here. Trainers must satisfy the run's rule of admission, at stages and stores as in rounds; observers need no
ticket, and decide nothing as trainers. Standing comes from the certified commits of a stage: its voters and its late
contributors have it. Before a stage has a commit that we know, its admitted trainers do.

A key whose result two thirds of the voters of a stage contradict counts nowhere any more, also after a restart.
"""

import time
from collections.abc import Iterable

from protocol.admission import AdmissionPolicy
from protocol.electorate import Electorate
from protocol.errors import StaleError
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.membership.record_fields import record_of_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.results import Contradiction, ExcludedMaker

MAX_EXCLUDED = 1024


class AdmittedPeers:
    """The live peers of a node's run that its rule of admission lets take part.

    Args:
        stages: the number of stages of the run, 1 for the whole model.
        excluded: the keys that an earlier process has excluded.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        gate: AdmissionPolicy,
        stages: int = 1,
        excluded: Iterable[ExcludedMaker] = (),
    ) -> None:
        self.directory = directory
        self.gate = gate
        self._stages = stages
        self._electorates: dict[int, Electorate] = {}  # at the newest known head of each stage
        self.excluded = {each.found.liar: each for each in excluded if each.found.liar != directory.peer_id}

    @property
    def contradicted(self) -> frozenset[PeerId]:
        """Return the keys whose results voters contradict."""
        return frozenset(self.excluded)

    def records(self) -> dict[PeerId, PeerRecord]:
        """Return the records of the live peers without trainers that the run does not admit."""
        now = time.time()
        live = self.directory.live().items()
        return {peer: record for peer, record in live if self._counts(peer, record, now)}

    def exclude(self, found: Contradiction, stage: int) -> bool:
        """Exclude the key that a contradiction proves to have signed a false result; return whether that is news.

        Raises StaleError if it proves nothing by the voters of the stage that we know.
        """
        electorate = self._electorates.get(stage)
        if electorate is None or not found.proves(electorate.voters):
            raise StaleError("the voters that we know do not contradict that result")
        is_news = found.liar not in (*self.excluded, self.directory.peer_id)
        if not is_news or len(self.excluded) >= MAX_EXCLUDED:
            return False
        self.excluded[found.liar] = ExcludedMaker(found, electorate.voters)
        return True

    def _counts(self, peer: PeerId, record: PeerRecord, now: float) -> bool:
        if peer in self.excluded:
            return False
        return record.role != "trainer" or self.gate.admits(peer, record.ticket, now)

    def admits(self, peer: PeerId, record: PeerRecord) -> bool:
        """Return whether the run admits a peer with this record, whatever its role is."""
        return peer not in self.excluded and self.gate.admits(peer, record.ticket, time.time())

    def require(self, caller: PeerId) -> None:
        """Raise StaleError unless the run admits a caller, as far as we know its record."""
        record = self.directory.live().get(caller)
        if caller in self.excluded:
            raise StaleError(f"{caller} is excluded: its result was false")
        if not self.gate.admits(caller, record.ticket if record is not None else b"", time.time()):
            raise StaleError(f"the run does not admit {caller}, or its record has not arrived yet")

    def learn(self, stage: int | None, electorate: Electorate) -> None:
        """Learn the electorate at a head of a stage whose certificates were checked; None for the whole model."""
        self._electorates[stage or 0] = electorate
        self.gate.revoked = frozenset().union(*(known.revoked for known in self._electorates.values()))

    def standing_records(self) -> dict[PeerId, PeerRecord]:
        """Return the records of the admitted trainers with standing at any stage.

        If a stage has no live peer with standing, its admitted trainers may go on without those.
        """
        records, found = self.records(), dict[PeerId, PeerRecord]()
        for stage in range(self._stages):
            here = {peer: record for peer, record in records.items() if self._serves(record, stage)}
            members = self._members(stage)
            found |= {peer: record for peer, record in here.items() if peer in members} or here
        return found

    def had_standing(self, peer: PeerId, record: PeerRecord) -> bool:
        """Return whether a trainer that left, with this last record, had standing at its stage."""
        stages = [stage for stage in range(self._stages) if self._serves(record, stage)]
        known = [self._members(stage) for stage in stages]
        return self.admits(peer, record) and any(peer in members or not members for members in known)

    def _members(self, stage: int) -> frozenset[PeerId]:
        known = self._electorates.get(stage)
        return known.standing if known is not None else frozenset()

    def _serves(self, record: PeerRecord, stage: int) -> bool:
        if self._stages == 1:
            return record.role == "trainer"
        return record_of_stage(record, stage) is not None

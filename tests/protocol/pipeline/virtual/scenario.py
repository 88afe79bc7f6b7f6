"""Describe a virtual pipeline: its peers, their machines and links, and the names of its blobs."""

import hashlib
from dataclasses import dataclass

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.pipeline.messages import Key
from protocol.pipeline.stage import StageSettings

ACTIVATION, TOKENS = 1000, 10


@dataclass(frozen=True)
class Scenario:
    """What a swarm is like. `speeds`: of the servers of each stage, in microbatches a second.

    `hidden`: peers behind routers; an activation from one to another is given up after a minute.
    """

    speeds: tuple[tuple[float, ...], ...]
    in_flight: int = 8
    quota: int = 16  # microbatches of each owner
    owners: int = 2  # the last of the servers
    step_size: int = 4
    memory: int = 40 * ACTIVATION
    delay: float = 0.02
    loss: float = 0.0
    duplication: float = 0.0
    bandwidth: float = 1e7
    expiry: float = 3.0  # until the dead are no longer listed
    deadline: float = 600.0
    steps_per_contribution: int = 2
    hidden: frozenset[PeerId] = frozenset()
    owners_send_tokens: bool = False  # to all stages
    stages_need_tokens: bool = False


def run_id(stage: int) -> str:
    return hashlib.sha256(b"stage %d" % stage).hexdigest()


def blob_of(key: Key, what: str, size: int) -> Blob:
    return Blob(hashlib.blake2b(f"{key.owner} {key.serial} {what}".encode(), digest_size=32).digest(), size)


def stage_settings(scenario: Scenario, stage: int) -> StageSettings:
    """Return the settings of the servers of a stage."""
    return StageSettings(
        run_id(stage),
        stage,
        len(scenario.speeds),
        ACTIVATION,
        TOKENS,
        scenario.step_size,
        scenario.memory,
        scenario.stages_need_tokens,
    )

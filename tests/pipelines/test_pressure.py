"""A server with memory for three microbatches, and owners with sixteen in flight: nothing waits in a circle."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Audit, Setting, Start, running

# The seeds of tests/protocol/pipeline find the same bugs for each change.
pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(240)]
MICROBATCHES, PEERS = 67, 3
# A microbatch has two activations at stage 1 after its forward pass, and four in its backward pass. With room for a
# backward pass each owner may have one there; without, two, and all memory is taken.
TIGHT = Setting(stages=PEERS, step=64, in_flight=16, memory=12, width=1024, seconds=0.001)
STALL_SECONDS = 2.0


def test_microbatches_end_where_memory_holds_three_of_them(zygote: str, tmp_path: Path) -> None:
    with running(zygote, tmp_path, TIGHT, *map(Start, range(PEERS))) as swarm:
        swarm.begin(MICROBATCHES)
        ended = swarm.wait_until_ended(PEERS * MICROBATCHES)
        assert set(ended.values()) == {"done"}, swarm.describe()
        assert sum(peer.last["served answers"].get("busy", 0) for peer in swarm.peers) > 0
        assert all(peer.last["peak"] <= TIGHT.memory_bytes for peer in swarm.peers)
        assert all(swarm.audit(peer) == Audit(MICROBATCHES, missing=0, doubled=0) for peer in swarm.peers)


def test_without_memory_for_backwards_all_wait_for_one_another(zygote: str, tmp_path: Path) -> None:
    starts = [Start(stage, naive=("reserves nothing for backwards",)) for stage in range(PEERS)]
    with running(zygote, tmp_path, TIGHT, *starts) as swarm:
        swarm.begin(MICROBATCHES)
        before = swarm.wait_until_still(STALL_SECONDS)
        assert before < PEERS * MICROBATCHES

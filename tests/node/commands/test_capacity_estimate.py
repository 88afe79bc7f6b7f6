"""What a run takes of a machine is said before it starts, and what does not fit is refused."""

import pytest
import torch

from node.commands.capacity import DAEMON_PROCESS_BYTES, estimate_needs, estimate_peer, measure_flops
from node.from_manifest import build_node_program, in_memory_mode
from node.trainer.ipc.shared_memory import SharedLayout
from protocol.errors import DeviceError
from tests.node.small_run import MANIFEST

GIGA = 1e9


def test_prediction_names_bytes_microbatch_and_speed() -> None:
    found = estimate_peer(MANIFEST, "cpu", GIGA, 100 * GIGA)
    assert (
        found.main_bytes == estimate_needs(MANIFEST, "cpu").memory + DAEMON_PROCESS_BYTES and found.device_bytes is None
    )
    lines = list(found.lines(3, 8 * 10**9))
    assert any("main memory" in line and "of 8.0 GB free" in line for line in lines)
    assert any("tokens a second" in line for line in lines)
    twice = estimate_peer(MANIFEST, "cpu", GIGA, 200 * GIGA)
    assert twice.tokens_per_second == pytest.approx(2 * found.tokens_per_second)
    assert estimate_peer(MANIFEST, "cuda", GIGA, GIGA).device_bytes is not None


def test_swarm_that_does_not_fit_is_refused() -> None:
    """Control: one byte more is enough."""
    found = estimate_peer(MANIFEST, "cpu", GIGA, GIGA)
    found.require_memory(3, 3 * found.main_bytes)
    with pytest.raises(DeviceError, match="3 peers of this run take .* start fewer with --peers"):
        found.require_memory(3, 3 * found.main_bytes - 1)


def test_less_memory_is_suggested_where_only_that_fits() -> None:
    """Controls: where not even that fits, and where the run excludes it, nothing is suggested."""
    large = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"width": 256, "layers": 8})})
    found = estimate_peer(large, "cpu", GIGA, GIGA)
    assert found.small_bytes is not None
    layouts = [SharedLayout.of(build_node_program(large, mode)) for mode in ("normal", "small")]
    assert found.main_bytes - found.small_bytes == layouts[0].total_bytes - layouts[1].total_bytes
    with pytest.raises(DeviceError, match="add --memory-mode small, which takes"):
        found.require_memory(1, found.small_bytes)
    with pytest.raises(DeviceError) as error:
        found.require_memory(1, found.small_bytes - 1)
    assert "--memory-mode" not in str(error.value)
    local_adam = large.model_copy(update={"method": large.method.model_copy(update={"recipe": "local-adam"})})
    assert estimate_peer(local_adam, "cpu", GIGA, GIGA).small_bytes is None
    assert estimate_peer(in_memory_mode(large, "small"), "cpu", GIGA, GIGA).main_bytes == found.small_bytes


def test_speed_of_matrix_products_is_measured() -> None:
    assert measure_flops(torch.device("cpu")) > 1e8

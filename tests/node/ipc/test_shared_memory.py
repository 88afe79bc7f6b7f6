"""Other processes read what one writes to shared memory, and a killed writer leaves no torn snapshot."""

import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.ipc.shared_memory import (
    MAX_META_BYTES,
    REFERENCE,
    RESIDUAL,
    SharedLayout,
    SharedMemory,
    locally_trained_names,
)
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, WEIGHTS
from optim.recipes import RECIPES
from protocol.errors import StorageError
from tests.optim.fake_peers import NUMEL, Tables, make_planner

pytestmark = pytest.mark.slow

LARGE = 1_000_000  # a snapshot of it takes milliseconds, so that kills land inside
VECTORS = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT, RESIDUAL, REFERENCE)


def make_layout(numel: int = 1001, outbox_bytes: int = 64) -> SharedLayout:
    return SharedLayout(numel, tuple((name, numel) for name in VECTORS), outbox_bytes)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    created = SharedMemory.create(make_layout())
    yield created
    created.close()


def constant(numel: int, value: float) -> dict[str, Tensor]:
    return {name: torch.full((numel,), value) for name in VECTORS}


class WriterDiedError(Exception):
    pass


class DyingWriter(Mapping[str, Tensor]):
    """Vectors that fail at the third, as if the writer died half-way."""

    def __init__(self, whole: dict[str, Tensor]) -> None:
        self._whole = whole

    def __getitem__(self, name: str) -> Tensor:
        if name == VECTORS[2]:
            raise WriterDiedError
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layout_has_the_vectors_of_the_method(recipe: str) -> None:
    planner = make_planner(recipe)
    method, layout = planner.method, SharedLayout.of(planner)
    sizes = dict(layout.vectors)
    assert (
        layout.anchor_numel == NUMEL * len(method.signal.shared_names)
        and layout.contribution_bytes == planner.max_contribution_bytes
    )
    assert list(sizes) == [WEIGHTS, *method.inner.vectors, RESIDUAL, REFERENCE]
    assert sizes[RESIDUAL] == planner.signal_numel and sizes[REFERENCE] == NUMEL * len(locally_trained_names(method))
    assert locally_trained_names(method)[0] == WEIGHTS and set(locally_trained_names(method)) <= {
        *method.signal.shared_names,
        *method.inner.vectors,
    }
    created = SharedMemory.create(layout)
    created.anchor(0).fill_(1.0)
    created.write_snapshot({name: torch.full((size,), 2.0) for name, size in layout.vectors}, {})
    created.contribution_buffer[:] = b"\1" * layout.contribution_bytes
    assert created.anchor(0).numel() == layout.anchor_numel and bool((created.anchor(0) == 1).all())
    created.close()


def test_vectors_do_not_overlap_and_start_at_a_page() -> None:
    layout = SharedLayout(5000, (("weights", 3), ("residual", 2000)), 7)
    sizes = [5000, 5000, 3, 2000, 3, 2000]
    starts = [layout.offset(index) for index in range(len(sizes) + 1)]
    assert all(start % 4096 == 0 for start in starts)
    assert all(start + 4 * size <= after for start, size, after in zip(starts, sizes, starts[1:], strict=False))
    assert layout.total_bytes == starts[-1] + 7


def test_methods_have_different_layout_hashes() -> None:
    signal: Tables = {"signal": {"kind": "inner-state"}, "adoption": {"unsent": 0.0}}
    kinds = [
        SharedLayout.of(make_planner(recipe, tables))
        for recipe, tables in (("averaging", {}), ("averaging", signal), ("data-parallel", {}), ("noloco", {}))
    ]
    assert len({layout.layout_hash() for layout in kinds}) == len(kinds)


def test_anchor_buffers_alternate_and_do_not_overlap(memory: SharedMemory) -> None:
    memory.anchor(4).fill_(4.0)
    memory.anchor(5).fill_(5.0)
    memory.contribution_buffer[:] = b"\xff" * 64
    assert bool((memory.anchor(4) == 4).all()) and bool((memory.anchor(5) == 5).all())
    memory.anchor(6).fill_(6.0)
    assert float(memory.anchor(4)[0]) == 6.0


def test_anchors_snapshots_and_outbox_do_not_overlap(memory: SharedMemory) -> None:
    for round_number in (0, 1):
        memory.anchor(round_number).fill_(-1 - round_number)
    memory.contribution_buffer[:] = b"\x07" * 64
    for value in (1.0, 2.0):
        memory.write_snapshot({name: torch.full((1001,), value + 10 * i) for i, name in enumerate(VECTORS)}, {})
    snapshot = memory.read_snapshot()
    assert snapshot is not None
    for index, name in enumerate(VECTORS):
        assert torch.equal(snapshot.vectors[name], torch.full((1001,), 2.0 + 10 * index))
    assert bool((memory.anchor(0) == -1).all()) and bool((memory.anchor(1) == -2).all())
    assert bytes(memory.contribution_buffer) == b"\x07" * 64


def test_read_snapshot_returns_the_newest(memory: SharedMemory) -> None:
    assert memory.read_snapshot() is None
    assert memory.copy_snapshot() is None
    for step in range(5):
        generation = memory.write_snapshot(constant(1001, float(step)), {"step": step})
        snapshot = memory.read_snapshot()
        assert snapshot is not None
        assert (snapshot.generation, snapshot.meta) == (generation, {"step": step})
        assert all(bool((vector == step).all()) for vector in snapshot.vectors.values())


def test_another_process_shares_it_by_the_descriptor(memory: SharedMemory) -> None:
    child = os.fork()
    if child == 0:
        theirs = SharedMemory.attach(memory.fd, make_layout())
        theirs.write_snapshot(constant(1001, 3.0), {"from": "child"})
        theirs.contribution_buffer[:3] = b"out"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    copied = memory.copy_snapshot(contribution_bytes=3)
    assert copied is not None
    assert (copied[0].meta, copied[1]) == ({"from": "child"}, b"out")


def test_snapshot_copy_does_not_change_with_the_memory(memory: SharedMemory) -> None:
    memory.write_snapshot(constant(1001, 1.0), {})
    copied = memory.copy_snapshot()
    assert copied is not None
    for value in (2.0, 3.0):
        memory.write_snapshot(constant(1001, value), {})
    assert bool((copied[0].vectors["weights"] == 1).all())


def test_unfinished_snapshot_is_not_read(memory: SharedMemory) -> None:
    memory.write_snapshot(constant(1001, 1.0), {"step": 1})
    memory.write_snapshot(constant(1001, 2.0), {"step": 2})
    with pytest.raises(WriterDiedError):
        memory.write_snapshot(DyingWriter(constant(1001, 3.0)), {"step": 3})
    snapshot = memory.read_snapshot()
    assert snapshot is not None and snapshot.meta == {"step": 2}
    assert all(bool((vector == 2).all()) for vector in snapshot.vectors.values())
    memory.write_snapshot(constant(1001, 4.0), {"step": 4})
    after = memory.read_snapshot()
    assert after is not None and after.meta == {"step": 4}


def test_slot_with_damaged_metadata_is_skipped(memory: SharedMemory) -> None:
    memory.write_snapshot(constant(1001, 1.0), {"step": 1})
    memory.write_snapshot(constant(1001, 2.0), {"step": 2})
    data = os.pread(memory.fd, 3 * MAX_META_BYTES, 0)
    position = data.index(b'{"step":2}')
    os.pwrite(memory.fd, b'{"step":3}', position)
    snapshot = memory.read_snapshot()
    assert snapshot is not None and snapshot.meta == {"step": 1}


def test_half_written_slot_is_never_read(memory: SharedMemory) -> None:
    for step in (1, 2):
        memory.write_snapshot(constant(1001, float(step)), {"step": step})
    with pytest.raises(WriterDiedError):
        memory.write_snapshot(DyingWriter(constant(1001, 3.0)), {"step": 3})
    data = os.pread(memory.fd, 3 * MAX_META_BYTES, 0)
    os.pwrite(memory.fd, b'{"step":9}', data.index(b'{"step":2}'))
    assert memory.read_snapshot() is None, "the other slot still has the metadata of step 1, but not its tensors"


def test_attach_rejects_another_layout(memory: SharedMemory) -> None:
    with pytest.raises(ValueError, match="not shared memory for 5000 shared values"):
        SharedMemory.attach(memory.fd, make_layout(5000))
    os.pwrite(memory.fd, struct.pack("<Q", 1002), 8)
    with pytest.raises(ValueError, match="another layout"):
        SharedMemory.attach(memory.fd, make_layout())


def test_metadata_is_bounded_and_finite(memory: SharedMemory) -> None:
    with pytest.raises(ValueError, match="metadata"):
        memory.write_snapshot(constant(1001, 0.0), {"long": "x" * MAX_META_BYTES})
    with pytest.raises(ValueError, match="JSON compliant"):
        memory.write_snapshot(constant(1001, 0.0), {"loss": float("nan")})
    assert memory.read_snapshot() is None


def test_too_little_memory_raises_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="no room for .* MiB of shared memory"):
        SharedMemory.create(make_layout(1_000_000, 10))


@pytest.mark.parametrize("memfd", [True, False])
def test_memory_has_no_name_in_the_file_system(memfd: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    created = SharedMemory.create(make_layout())
    created.write_snapshot(constant(1001, 1.0), {})
    assert set(os.listdir("/dev/shm")) == before
    assert not list(tmp_path.iterdir())
    created.close()
    assert created.fd == -1


def kill_writer(memory: SharedMemory, write: Callable[[SharedMemory, int], object], delay: float) -> None:
    """Write snapshots of constants in a child process, and kill it after `delay` seconds."""
    child = os.fork()
    if child == 0:
        for value in range(1, 10_000):
            write(memory, value)
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def write_whole(memory: SharedMemory, value: int) -> None:
    memory.write_snapshot(constant(LARGE, float(value)), {"value": value})


def write_in_place(memory: SharedMemory, value: int) -> None:
    """Control: copy into the same slot every time, without a second one."""
    for vector in memory._slot_vectors(0).values():
        vector.fill_(float(value))


def is_uniform(vectors: Mapping[str, Tensor]) -> bool:
    value = float(vectors["weights"][0])
    return all(bool((vector == value).all()) for vector in vectors.values())


@pytest.mark.parametrize("seed", [1])
def test_writer_killed_at_random_moments_leaves_no_torn_snapshot(seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)
    memory, control = SharedMemory.create(make_layout(LARGE, 1)), SharedMemory.create(make_layout(LARGE, 1))
    for value in (1, 2):
        write_whole(memory, value)
    torn = 0
    for _ in range(12):
        kill_writer(memory, write_whole, rng.uniform(0.03, 0.08))
        snapshot = memory.read_snapshot()
        assert snapshot is not None
        assert is_uniform(snapshot.vectors)
        assert snapshot.meta == {"value": int(snapshot.vectors["weights"][0])}
        kill_writer(control, write_in_place, rng.uniform(0.03, 0.08))
        torn += not is_uniform(control._slot_vectors(0))
    assert torn >= 3, "control: writes in place must tear"

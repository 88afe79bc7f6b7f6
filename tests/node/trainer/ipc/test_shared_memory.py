"""Other processes read what one writes to shared memory, and notice a writer that is in the middle of a change."""

import itertools
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.trainer.ipc.shared_memory import (
    MAX_META_BYTES,
    REFERENCE,
    RESIDUAL,
    SharedLayout,
    SharedMemory,
    locally_trained_names,
)
from optim.compose import with_small_memory
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, WEIGHTS
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner
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
    created.scratch.fill_(3.0)
    assert created.scratch.numel() == max(sizes[RESIDUAL], sizes[REFERENCE])
    assert all(bool((vector == 2).all()) for vector in created.vectors.values())
    created.contribution_buffer[:] = b"\1" * layout.contribution_bytes
    assert created.anchor(0).numel() == layout.anchor_numel and bool((created.anchor(0) == 1).all())
    created.close()


def test_vectors_do_not_overlap_and_start_at_a_page() -> None:
    layout = SharedLayout(5000, (("weights", 3), ("residual", 2000)), 7, 4000)
    sizes = [5000, 5000, 3, 2000, 4000]
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
        theirs = SharedMemory.attach(memory.fds, make_layout())
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


def test_metadata_that_is_damaged_is_skipped(memory: SharedMemory) -> None:
    for step in (1, 2):
        memory.publish({"step": step})
    data = os.pread(memory.fds[0], 3 * MAX_META_BYTES, 0)
    os.pwrite(memory.fds[0], b'{"step":3}', data.index(b'{"step":2}'))
    snapshot = memory.read_snapshot()
    assert snapshot is not None and snapshot.meta == {"step": 1}


def test_vectors_that_are_half_replaced_are_not_read(memory: SharedMemory) -> None:
    memory.write_snapshot(constant(1001, 1.0), {"step": 1})
    with pytest.raises(WriterDiedError):
        memory.write_snapshot(DyingWriter(constant(1001, 3.0)), {"step": 3})
    assert memory.read_snapshot() is None


def test_attach_rejects_another_layout(memory: SharedMemory) -> None:
    with pytest.raises(ValueError, match="not shared memory for 5000 shared values"):
        SharedMemory.attach(memory.fds, make_layout(5000))
    os.pwrite(memory.fds[0], struct.pack("<Q", 1002), 8)
    with pytest.raises(ValueError, match="another layout"):
        SharedMemory.attach(memory.fds, make_layout())


def test_metadata_is_bounded_and_finite(memory: SharedMemory) -> None:
    with pytest.raises(ValueError, match="metadata"):
        memory.publish({"long": "x" * MAX_META_BYTES})
    with pytest.raises(ValueError, match="JSON compliant"):
        memory.publish({"loss": float("nan")})
    assert memory.read_snapshot() is None


def test_too_little_memory_raises_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="no room for .* MiB of shared memory"):
        SharedMemory.create(make_layout(1_000_000, 10))


@pytest.mark.parametrize("memfd", [True, False])
def test_memory_has_no_name_in_the_file_system(memfd: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without memfd and posix_fallocate, as on macOS, too: the file has its whole size, in blocks of its own."""
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    created = SharedMemory.create(make_layout())
    assert all(512 * os.fstat(fd).st_blocks >= os.fstat(fd).st_size > 0 for fd in created.fds)
    created.write_snapshot(constant(1001, 1.0), {})
    assert all(os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)") for fd in created.fds)
    assert not list(tmp_path.iterdir())
    created.close()
    assert created.fds == ()


def change_all_the_time(memory: SharedMemory, publishes: bool) -> None:
    """Fill all vectors with one number after another, and say so before and afterwards, or do not."""
    for value in itertools.count(2):
        if publishes:
            memory.publish({}, {"kind": "overwrite"})
        for vector in memory.vectors.values():
            vector.fill_(float(value))
        if publishes:
            memory.publish({"value": value})
        time.sleep(0.002)  # a trainer computes a gradient


def is_uniform(vectors: Mapping[str, Tensor]) -> bool:
    value = float(vectors["weights"][0])
    return all(bool((vector == value).all()) for vector in vectors.values())


@pytest.mark.parametrize("publishes", [True, False])
def test_copy_is_whole_while_a_trainer_changes_its_vectors(publishes: bool) -> None:
    """The control does not publish its changes."""
    torch.set_num_threads(1)
    memory = SharedMemory.create(make_layout(LARGE, 1))
    memory.write_snapshot(constant(LARGE, 1.0), {"value": 1})
    child = os.fork()
    if child == 0:
        change_all_the_time(memory, publishes)
    try:
        copies = [memory.copy_snapshot() for _ in range(12)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    whole = [is_uniform(copied[0].vectors) for copied in copies if copied is not None]
    assert len(whole) == 12
    if publishes:
        assert all(whole)
        assert all(
            copied is not None and copied[0].meta["value"] == copied[0].vectors["weights"][0] for copied in copies
        )
    else:
        assert not all(whole)


def test_change_waits_for_a_reader_but_not_for_ever(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write_snapshot(constant(1001, 1.0), {})
    monkeypatch.setattr("node.trainer.ipc.shared_memory.HOLD_SECONDS", 0.2)
    readings = memory.whole_snapshots()
    first = next(readings)
    began = time.monotonic()
    memory.publish({}, {"kind": "overwrite"})
    assert time.monotonic() - began >= 0.2 and not memory.is_newest(first)
    readings.close()
    began = time.monotonic()
    memory.publish({}, {"kind": "overwrite"})
    assert time.monotonic() - began < 0.2


def test_change_that_never_ends_is_not_copied(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write_snapshot(constant(1001, 1.0), {})
    memory.publish({}, {"kind": "overwrite"})
    monkeypatch.setattr("node.trainer.ipc.shared_memory.COPY_SECONDS", 0.05)
    with pytest.raises(StorageError, match="overloaded"):
        memory.copy_snapshot()


def test_vectors_that_only_rounds_use_are_in_a_file_without_a_name(tmp_path: Path) -> None:
    """The control has them in memory."""
    planner = make_planner("frugal")
    small = RoundPlanner(with_small_memory(planner.method), planner.layout, 1)
    in_memory, layout = SharedLayout.of(planner), SharedLayout.of(small)
    assert in_memory.file_bytes == 0 and in_memory.total_bytes - layout.total_bytes >= 4 * 4 * NUMEL
    assert 4 * 4 * NUMEL <= layout.file_bytes < 4 * 4 * NUMEL + 4 * 4096
    created = SharedMemory.create(layout, tmp_path)
    assert not list(tmp_path.iterdir())
    created.anchor(0).fill_(1.0)
    created.anchor(1).fill_(2.0)
    for number, vector in enumerate(created.vectors.values()):
        vector.fill_(3 + number)
    attached = SharedMemory.attach(created.fds, layout)
    assert bool((attached.anchor(0) == 1).all()) and bool((attached.anchor(1) == 2).all())
    for number, (name, vector) in enumerate(attached.vectors.items()):
        assert bool((vector == 3 + number).all()), name
        assert (vector.dtype is torch.uint8) == name.endswith("codes")
    assert os.pread(created.fds[1], 4, 0) == struct.pack("<f", 1.0)
    with pytest.raises(ValueError, match="are not shared memory"):
        SharedMemory.attach(created.fds[:1], layout)
    created.close()

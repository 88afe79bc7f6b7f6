"""The shared memory: what is written is read, by other processes too, and a killed writer tears nothing."""

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

LARGE = 1_000_000  # a snapshot of it takes milliseconds, so that kills land inside
VECTORS = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT, RESIDUAL, REFERENCE)


def contents(numel: int = 1001, outbox_bytes: int = 64) -> SharedLayout:
    return SharedLayout(numel, tuple((name, numel) for name in VECTORS), outbox_bytes)


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    made = SharedMemory.create(contents())
    yield made
    made.close()


def constant(numel: int, value: float) -> dict[str, Tensor]:
    return {name: torch.full((numel,), value) for name in VECTORS}


class WriterDiedError(Exception):
    pass


class Tearing(Mapping[str, Tensor]):
    """Vectors of which the third is never handed out: the writer dies half-way."""

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
def test_it_holds_what_the_method_asks_for(recipe: str) -> None:
    program = make_planner(recipe)
    method, found = program.method, SharedLayout.of(program)
    sizes = dict(found.vectors)
    assert (
        found.anchor_numel == NUMEL * len(method.signal.shared_names)
        and found.contribution_bytes == program.max_contribution_bytes
    )
    assert list(sizes) == [WEIGHTS, *method.inner.vectors, RESIDUAL, REFERENCE]
    assert sizes[RESIDUAL] == program.signal_numel and sizes[REFERENCE] == NUMEL * len(locally_trained_names(method))
    assert locally_trained_names(method)[0] == WEIGHTS and set(locally_trained_names(method)) <= {
        *method.signal.shared_names,
        *method.inner.vectors,
    }
    made = SharedMemory.create(found)
    made.anchor(0).fill_(1.0)
    made.write_snapshot({name: torch.full((size,), 2.0) for name, size in found.vectors}, {})
    made.contribution_buffer[:] = b"\1" * found.contribution_bytes
    assert made.anchor(0).numel() == found.anchor_numel and bool((made.anchor(0) == 1).all())
    made.close()


def test_no_place_is_shared_and_each_starts_at_a_page() -> None:
    found = SharedLayout(5000, (("weights", 3), ("residual", 2000)), 7)
    sizes = [5000, 5000, 3, 2000, 3, 2000]
    starts = [found.offset(index) for index in range(len(sizes) + 1)]
    assert all(start % 4096 == 0 for start in starts)
    assert all(start + 4 * size <= after for start, size, after in zip(starts, sizes, starts[1:], strict=False))
    assert found.total_bytes == starts[-1] + 7


def test_another_method_is_another_layout() -> None:
    signal: Tables = {"signal": {"kind": "inner-state"}, "adoption": {"unsent": 0.0}}
    kinds = [
        SharedLayout.of(make_planner(recipe, tables))
        for recipe, tables in (("averaging", {}), ("averaging", signal), ("data-parallel", {}), ("noloco", {}))
    ]
    assert len({found.layout_hash() for found in kinds}) == len(kinds)


def test_anchor_buffers_alternate_and_do_not_overlap(arena: SharedMemory) -> None:
    arena.anchor(4).fill_(4.0)
    arena.anchor(5).fill_(5.0)
    arena.contribution_buffer[:] = b"\xff" * 64
    assert bool((arena.anchor(4) == 4).all()) and bool((arena.anchor(5) == 5).all())
    arena.anchor(6).fill_(6.0)
    assert float(arena.anchor(4)[0]) == 6.0


def test_everything_has_its_own_place(arena: SharedMemory) -> None:
    for round_number in (0, 1):
        arena.anchor(round_number).fill_(-1 - round_number)
    arena.contribution_buffer[:] = b"\x07" * 64
    for value in (1.0, 2.0):
        arena.write_snapshot({name: torch.full((1001,), value + 10 * i) for i, name in enumerate(VECTORS)}, {})
    snapshot = arena.read_snapshot()
    assert snapshot is not None
    for index, name in enumerate(VECTORS):
        assert torch.equal(snapshot.vectors[name], torch.full((1001,), 2.0 + 10 * index))
    assert bool((arena.anchor(0) == -1).all()) and bool((arena.anchor(1) == -2).all())
    assert bytes(arena.contribution_buffer) == b"\x07" * 64


def test_snapshot_is_none_before_the_first_then_the_newest(arena: SharedMemory) -> None:
    assert arena.read_snapshot() is None
    assert arena.copy_snapshot() is None
    for step in range(5):
        generation = arena.write_snapshot(constant(1001, float(step)), {"step": step})
        snapshot = arena.read_snapshot()
        assert snapshot is not None
        assert (snapshot.generation, snapshot.meta) == (generation, {"step": step})
        assert all(bool((vector == step).all()) for vector in snapshot.vectors.values())


def test_another_process_sees_it_through_the_descriptor(arena: SharedMemory) -> None:
    child = os.fork()
    if child == 0:
        theirs = SharedMemory.attach(arena.fd, contents())
        theirs.write_snapshot(constant(1001, 3.0), {"from": "child"})
        theirs.contribution_buffer[:3] = b"out"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    copied = arena.copy_snapshot(contribution_bytes=3)
    assert copied is not None
    assert (copied[0].meta, copied[1]) == ({"from": "child"}, b"out")


def test_copy_does_not_change_with_the_arena(arena: SharedMemory) -> None:
    arena.write_snapshot(constant(1001, 1.0), {})
    copied = arena.copy_snapshot()
    assert copied is not None
    for value in (2.0, 3.0):
        arena.write_snapshot(constant(1001, value), {})
    assert bool((copied[0].vectors["weights"] == 1).all())


def test_an_unfinished_snapshot_is_not_seen(arena: SharedMemory) -> None:
    arena.write_snapshot(constant(1001, 1.0), {"step": 1})
    arena.write_snapshot(constant(1001, 2.0), {"step": 2})
    with pytest.raises(WriterDiedError):
        arena.write_snapshot(Tearing(constant(1001, 3.0)), {"step": 3})
    snapshot = arena.read_snapshot()
    assert snapshot is not None and snapshot.meta == {"step": 2}
    assert all(bool((vector == 2).all()) for vector in snapshot.vectors.values())
    arena.write_snapshot(constant(1001, 4.0), {"step": 4})
    after = arena.read_snapshot()
    assert after is not None and after.meta == {"step": 4}


def test_a_slot_whose_meta_data_is_damaged_is_skipped(arena: SharedMemory) -> None:
    arena.write_snapshot(constant(1001, 1.0), {"step": 1})
    arena.write_snapshot(constant(1001, 2.0), {"step": 2})
    data = os.pread(arena.fd, 3 * MAX_META_BYTES, 0)
    place = data.index(b'{"step":2}')
    os.pwrite(arena.fd, b'{"step":3}', place)
    snapshot = arena.read_snapshot()
    assert snapshot is not None and snapshot.meta == {"step": 1}


def test_a_half_written_slot_is_never_fallen_back_on(arena: SharedMemory) -> None:
    for step in (1, 2):
        arena.write_snapshot(constant(1001, float(step)), {"step": step})
    with pytest.raises(WriterDiedError):
        arena.write_snapshot(Tearing(constant(1001, 3.0)), {"step": 3})
    data = os.pread(arena.fd, 3 * MAX_META_BYTES, 0)
    os.pwrite(arena.fd, b'{"step":9}', data.index(b'{"step":2}'))
    assert arena.read_snapshot() is None, "the other slot still has the meta data of step 1, but not its tensors"


def test_layout_of_another_size_is_refused(arena: SharedMemory) -> None:
    with pytest.raises(ValueError, match="no arena of 5000 shared values"):
        SharedMemory.attach(arena.fd, contents(5000))
    os.pwrite(arena.fd, struct.pack("<Q", 1002), 8)
    with pytest.raises(ValueError, match="another layout"):
        SharedMemory.attach(arena.fd, contents())


def test_meta_data_is_bounded_and_finite(arena: SharedMemory) -> None:
    with pytest.raises(ValueError, match="meta data"):
        arena.write_snapshot(constant(1001, 0.0), {"long": "x" * MAX_META_BYTES})
    with pytest.raises(ValueError, match="JSON compliant"):
        arena.write_snapshot(constant(1001, 0.0), {"loss": float("nan")})
    assert arena.read_snapshot() is None


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="no room for .* MiB of shared memory"):
        SharedMemory.create(contents(1_000_000, 10))


@pytest.mark.parametrize("memfd", [True, False])
def test_nothing_has_a_name(memfd: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    made = SharedMemory.create(contents())
    made.write_snapshot(constant(1001, 1.0), {})
    assert set(os.listdir("/dev/shm")) == before
    assert not list(tmp_path.iterdir())
    made.close()
    assert made.fd == -1


def kill_a_writer(arena: SharedMemory, write: Callable[[SharedMemory, int], object], delay: float) -> None:
    """A child process writes snapshots of constants, one after the other, until it is killed after `delay` seconds."""
    child = os.fork()
    if child == 0:
        for value in range(1, 10_000):
            write(arena, value)
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def write_whole(arena: SharedMemory, value: int) -> None:
    arena.write_snapshot(constant(LARGE, float(value)), {"value": value})


def write_in_place(arena: SharedMemory, value: int) -> None:
    """The control: the same copies into one slot, without a second one to fall back on."""
    for vector in arena._slot_vectors(0).values():
        vector.fill_(float(value))


def is_uniform(vectors: Mapping[str, Tensor]) -> bool:
    value = float(vectors["weights"][0])
    return all(bool((vector == value).all()) for vector in vectors.values())


@pytest.mark.parametrize("seed", [1])
def test_kill_at_random_moments_tears_no_snapshot(seed: int) -> None:
    moments = random.Random(seed)
    torch.set_num_threads(1)
    arena, control = SharedMemory.create(contents(LARGE, 1)), SharedMemory.create(contents(LARGE, 1))
    for value in (1, 2):
        write_whole(arena, value)
    torn = 0
    for _ in range(12):
        kill_a_writer(arena, write_whole, moments.uniform(0.03, 0.08))
        snapshot = arena.read_snapshot()
        assert snapshot is not None
        assert is_uniform(snapshot.vectors)
        assert snapshot.meta == {"value": int(snapshot.vectors["weights"][0])}
        kill_a_writer(control, write_in_place, moments.uniform(0.03, 0.08))
        torn += not is_uniform(control._slot_vectors(0))
    assert torn >= 3, "writing in place must tear, or this test proves nothing"

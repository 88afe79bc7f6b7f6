import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from optim.kernels.parallel import ALIGNMENT, parallel_for, thread_buffer, thread_buffer_like


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_work_is_called_once_for_every_item(threads: int) -> None:
    done: list[int] = []
    parallel_for(done.append, range(500))
    assert sorted(done) == list(range(500))


def test_exception_of_the_work_is_raised_and_the_workers_survive(threads: int) -> None:
    def work(item: int) -> None:
        if item == 7:
            raise ValueError("seven")

    for _ in range(20):
        with pytest.raises(ValueError, match="seven"):
            parallel_for(work, range(10))
    test_work_is_called_once_for_every_item(threads)


def test_nested_call_is_a_plain_loop_and_cannot_deadlock(threads: int) -> None:
    done: list[int] = []
    parallel_for(lambda _: parallel_for(done.append, range(3)), range(50))
    assert len(done) == 150


def test_torch_has_one_thread_in_workers_and_as_many_as_before_outside(threads: int) -> None:
    within: list[int] = []
    parallel_for(lambda _: within.append(torch.get_num_threads()), range(20))
    assert set(within) == {1}
    assert torch.get_num_threads() == threads
    later: list[int] = []
    newcomer = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join(10)
    assert later == [threads]


def test_concurrent_callers(threads: int) -> None:
    totals: list[int] = []

    def call() -> None:
        done: list[int] = []
        parallel_for(done.append, range(100))
        totals.append(len(done))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert totals == [100] * 8


def test_thread_buffer_is_kept_by_name_grows_and_belongs_to_its_thread() -> None:
    first = thread_buffer("one", np.float32, 100)
    assert np.shares_memory(first, thread_buffer("one", np.float32, 50))
    assert not np.shares_memory(first, thread_buffer("other", np.float32, 100))
    assert thread_buffer("one", np.float32, 200).size == 200
    assert thread_buffer("one", np.int8, 10).dtype == np.int8
    mine, others = thread_buffer("one", np.int8, 10), []
    thread = threading.Thread(target=lambda: others.append(thread_buffer("one", np.int8, 10)))
    thread.start()
    thread.join(10)
    assert not np.shares_memory(mine, others[0])


@pytest.mark.parametrize("count", [3, 1000, 70_001])
def test_thread_buffer_is_aligned_to_cache_lines(count: int) -> None:
    wide, narrow = thread_buffer("wide", np.float32, count), thread_buffer_like("narrow", np.int8, np.zeros((2, count)))
    assert wide.ctypes.data % ALIGNMENT == narrow.ctypes.data % ALIGNMENT == 0
    assert narrow.shape == (2, count)

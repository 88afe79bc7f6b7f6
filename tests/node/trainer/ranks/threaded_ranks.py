"""Ranks of a node as threads of this process, on the process group that torch has for tests; and one rank alone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from node.from_manifest import build_program
from node.model import build_model, initial_weights
from node.options import TrainerOptions
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.ranks.group import RankGroup
from node.trainer.ranks.messages import RankStep
from node.trainer.ranks.rank import DEFAULT_OPTIONS, Rank
from optim.inner.base import WEIGHTS
from protocol.manifest.run import Manifest

torch.set_num_threads(1)
T = TypeVar("T")
Vectors = dict[str, Tensor]


def on_all_ranks(ranks: int, work: Callable[[RankGroup], T], copies: int = 1) -> list[T]:
    """Do the same work on each rank, with so many copies of the model; return the results by rank."""
    mesh = torch.arange(ranks).view(copies, -1).tolist() if copies > 1 else ()
    store = dist.HashStore()  # type: ignore[attr-defined]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            dist.init_process_group("threaded", rank=number, world_size=ranks, store=store)
            results[number] = work(RankGroup(number, ranks, torch.device("cpu"), mesh))
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # type: ignore[no-untyped-call]

    with _threaded_groups():
        threads = [threading.Thread(target=run, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    if errors:
        raise next((error for error in errors if not isinstance(error, SystemExit)), errors[0])
    return [results[number] for number in range(ranks)]


@contextmanager
def _threaded_groups() -> Iterator[None]:
    isolate: Callable[[bool], None] = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
    isolate(True)
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        isolate(False)


def batch_of(manifest: Manifest, step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, manifest.model.vocabulary, (rows, manifest.model.context + 1), generator=generator)


def command_for(manifest: Manifest, step: int, rows: int) -> RankStep:
    return RankStep(step=step, rows=rows, train=manifest.train, age_at_join=0, moments_age_at_join=0)


def train_alone(manifest: Manifest, steps: int, rows: int) -> Vectors:
    """Return weights and optimizer vectors after some steps of one rank."""
    model = build_model(manifest.model)
    model.load_flat(initial_weights(manifest.model, 0))
    optimizer = InnerOptimizer(model, manifest.train, build_program(manifest).method.inner)
    for step in range(steps):
        accumulate_gradient(
            model, batch_of(manifest, step, rows), manifest.train.microbatch, optimizer.lookahead_weights(step)
        )
        optimizer.step(step)
        optimizer.clear_gradient()
    return {WEIGHTS: model.flat, **optimizer.vectors}


def train_together(
    manifest: Manifest, ranks: int, steps: int, rows: int, copies: int = 1, options: TrainerOptions = DEFAULT_OPTIONS
) -> Vectors:
    """Return weights and optimizer vectors after the same steps of several ranks."""
    program = build_program(manifest)
    memory = SharedMemory.create(SharedLayout.of(program))
    memory.vectors[WEIGHTS].copy_(initial_weights(manifest.model, 0))

    def work(group: RankGroup) -> None:
        rank = Rank(manifest, program.method.inner, manifest.train.microbatch, group, memory, options)
        assert not rank.compile_fault, rank.compile_fault
        rank.load(memory.vectors)
        for step in range(steps):
            windows = batch_of(manifest, step if group.rank == 0 else -1, rows)  # rank 0 has the batch
            rank.take_step(command_for(manifest, step, rows), windows)
        if group.holds_first_copy:
            rank.save(memory.vectors)

    try:
        on_all_ranks(ranks, work, copies)
        return {name: memory.vectors[name].clone() for name in (WEIGHTS, *program.method.inner.vectors)}
    finally:
        memory.close()

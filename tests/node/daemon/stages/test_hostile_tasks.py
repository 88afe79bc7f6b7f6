"""Hostile tasks end no node and leave no server waiting: the real activation store, fetcher and trainer of a stage."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from node.daemon.checkpoints.vote_log import ContradictionFile
from node.daemon.stages import stage_effects
from node.daemon.stages.activations import (
    ActivationFetcher,
    ActivationStore,
    FreeSlots,
    ServedActivations,
    neighbour_runs,
)
from node.trainer.ipc.stage_messages import ComputeStage, StageComputed
from node.trainer.stages.stage_work import StageWork
from protocol.blobs.blob import Blob
from protocol.electorate import OPEN, Electorate
from protocol.errors import MalformedError, StaleError
from protocol.identity import Identity
from protocol.pipeline.messages import Direction, HeldBlob, Input, Inputs, Task
from protocol.pipeline.microbatch_table import MicrobatchTable
from protocol.pipeline.owner_events import ResultsDiffer
from protocol.pipeline.results import Contradiction, ResultValue, StageQuestion, StageResult, sign_result
from protocol.pipeline.server_events import ReleasedBy
from tests.node.daemon.stages.attacked_stage import HOLDER, ME, OWNER, STRANGER, AttackedStage

TASKS = 300


@contextmanager
def raising_errors(recorder: object, maker: object) -> Iterator[None]:
    """Let an error that a peer causes end the node."""
    yield


def without_boundary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage_effects, "refusing_errors", raising_errors)


def without_inputs_of_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MicrobatchTable, "_with_inputs_of_forward", lambda self, task: task)


def without_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ActivationStore, "has", lambda self, blob: blob.digest in self._slots)


async def attack_with_other_inputs(stage: AttackedStage) -> None:
    """Ask for a forward of one activation, and then for its backward with another one."""
    last = stage.manifest.stage == 2
    first, other = stage.activation(1), stage.activation(2)
    second = stage.tokens(3) if last else stage.activation(3)
    for serial in range(2):
        stage.node.answer(stage.task(serial, "forward", first, second if last else None))
        await stage.settle()
        stage.node.answer(stage.task(serial, "backward", other, second))
        await stage.settle()


async def is_working(stage: AttackedStage) -> bool:
    """Return whether an honest owner's microbatch passes through the stage."""
    last = stage.manifest.stage == 2
    before, after = stage.activation(10), stage.tokens(11) if last else stage.activation(11)
    for direction in ("forward", "backward"):
        second = after if last or direction == "backward" else None
        stage.node.answer(stage.task(77, direction, before, second, OWNER))
        await stage.settle()
    return stage.inbox._fault is None and stage.statuses(OWNER) == ["done", "done"]


@pytest.mark.parametrize("number", [1, 2], ids=["middle", "last"])
async def test_backward_takes_its_inputs_from_its_forward(tmp_path: Path, number: int) -> None:
    stage = AttackedStage(tmp_path, number)
    await attack_with_other_inputs(stage)
    assert await is_working(stage)
    assert stage.statuses(STRANGER) == ["done"] * 4, "with the activation of its forward"


@pytest.mark.parametrize("number", [1, 2], ids=["middle", "last"])
async def test_old_rules_let_a_backward_with_other_inputs_end_the_node(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    without_inputs_of_forward(monkeypatch)
    without_boundary(monkeypatch)
    stage = AttackedStage(tmp_path, number)
    await attack_with_other_inputs(stage)
    assert not await is_working(stage) and stage.inbox._fault is not None


async def test_missing_input_is_an_invalid_task_of_its_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary holds by itself."""
    without_inputs_of_forward(monkeypatch)
    stage = AttackedStage(tmp_path)
    await attack_with_other_inputs(stage)
    assert stage.statuses(STRANGER) == ["done", "invalid"] * 2
    assert {peer for peer, _ in stage.directory.refused} == {STRANGER} and len(stage.directory.refused) == 2
    assert stage.stage._computing is None and await is_working(stage)


async def attack_with_other_size(stage: AttackedStage) -> None:
    """Name tokens that are here as an activation, and as the activation of another stage of the node."""
    tokens = stage.tokens(1)
    stage.node.answer(stage.task(0, "forward", stage.activation(2), tokens))
    await stage.settle()
    false = Blob(tokens.digest, stage.sizes.activation_bytes)
    stage.node.answer(stage.task(1, "forward", false, tokens))
    await stage.settle()
    task = stage.task(1, "backward", false, tokens)
    stage.node.answer(task)
    own = replace(task, serial=2, inputs=Inputs(HeldBlob(false, ME), task.inputs.tokens))
    stage.node.answer(own)
    await stage.settle()


async def test_blob_of_another_size_is_missing(tmp_path: Path) -> None:
    stage = AttackedStage(tmp_path, 2)
    free = stage.free_slots
    await attack_with_other_size(stage)
    assert stage.statuses(STRANGER) == ["done"] + ["missing"] * 3
    assert await is_working(stage)
    stage.inbox.post(ReleasedBy(STRANGER, (0, 1, 2)))
    stage.inbox.post(ReleasedBy(OWNER, (77,)))
    assert stage.free_slots == free


async def test_old_rule_gives_the_trainer_a_slot_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the trainer finds it now, where it used to view the slot as an activation."""
    without_sizes(monkeypatch)
    faults: list[str] = []
    compute = StageWork.compute

    def note(self: StageWork, command: ComputeStage) -> StageComputed:
        done = compute(self, command)
        faults.append(done.fault)
        return done

    monkeypatch.setattr(StageWork, "compute", note)
    stage = AttackedStage(tmp_path, 2)
    await attack_with_other_size(stage)
    assert "wrong input" in faults


def old_rule_of_blame(patch: pytest.MonkeyPatch) -> None:
    """The peer that a malformed input was downloaded from is to blame."""

    def blame(self: ActivationFetcher, task: Task, wrong: Input) -> None:
        self._directory.record_refusal(task.inputs.named()[wrong].holder, MalformedError("wrong"))

    patch.setattr(ActivationFetcher, "blame_maker", blame)


def stage_with_malformed_blob(folder: Path, patch: pytest.MonkeyPatch, is_old: bool) -> tuple[AttackedStage, Blob]:
    """Return a stage, with the old rule of blame or without it, and a blob of an activation's size that is none."""
    if is_old:
        old_rule_of_blame(patch)
    stage = AttackedStage(folder)
    return stage, stage.shelf.put(bytes([255]) * stage.sizes.activation_bytes)


def held_by(task: Task, activation: str, gradient: str = HOLDER) -> Task:
    """Let a task name these holders."""
    inputs = task.inputs
    assert inputs.activation is not None
    second = inputs.gradient and HeldBlob(inputs.gradient.blob, gradient)
    return replace(task, inputs=Inputs(HeldBlob(inputs.activation.blob, activation), inputs.tokens, second))


def signed_by(maker: Identity, stage: AttackedStage, blob: Blob, direction: Direction, after: bool) -> HeldBlob:
    """Return a blob with a signature of its holder, as the result of the stage after this one or before it."""
    run = neighbour_runs(stage.manifest)[after]
    result = StageResult(StageQuestion(0, b"", direction, (b"", b"", b""), ""), ResultValue(blob, None))
    return HeldBlob(blob, maker.peer_id, sign_result(maker, run, result).signed)


async def blamed(stage: AttackedStage, *tasks: Task) -> set[str]:
    """Return the peers that are to blame after these tasks."""
    for task in tasks:
        stage.node.answer(task)
        await stage.settle()
    return {peer for peer, _ in stage.directory.refused}


@pytest.mark.parametrize("is_old", [False, True], ids=["rule", "control"])
async def test_task_cannot_frame_a_peer_by_naming_it_as_the_holder(
    tmp_path: Path, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, malformed = stage_with_malformed_blob(tmp_path, monkeypatch, is_old)
    for number, holder in enumerate((STRANGER, HOLDER)):  # the second one while the blob is here
        stage.node.answer(held_by(stage.task(number, "forward", malformed), holder))
    await stage.settle()
    found = await blamed(stage)
    assert stage.statuses(STRANGER) == ["invalid"] * 2
    assert found == ({STRANGER, HOLDER} if is_old else {STRANGER})


@pytest.mark.parametrize("is_old", [False, True], ids=["rule", "control"])
async def test_blob_of_an_activations_size_does_not_frame_its_holder(
    tmp_path: Path, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers serve many blobs, such as contributions; an owner may name one of them as an activation."""
    stage, malformed = stage_with_malformed_blob(tmp_path, monkeypatch, is_old)
    task = held_by(stage.task(0, "backward", stage.activation(1), malformed), HOLDER, OWNER)
    assert await blamed(stage, task) == ({OWNER} if is_old else {STRANGER})
    assert stage.statuses(STRANGER) == ["invalid"]


@pytest.mark.parametrize(
    ("direction", "after", "is_same", "is_guilty"),
    [
        ("backward", True, True, True),
        ("forward", True, True, False),
        ("backward", False, True, False),
        ("backward", True, False, False),
    ],
    ids=["its result", "other direction", "other stage", "other blob"],
)
async def test_maker_is_to_blame_for_the_result_that_it_signed(
    tmp_path: Path, direction: Direction, after: bool, is_same: bool, is_guilty: bool
) -> None:
    stage, maker = AttackedStage(tmp_path), Identity.create()
    malformed = stage.shelf.put(bytes([255]) * stage.sizes.activation_bytes)
    held = signed_by(maker, stage, malformed if is_same else stage.activation(5), direction, after)
    task = stage.task(0, "backward", stage.activation(1), malformed)
    task = replace(task, inputs=replace(task.inputs, gradient=replace(held, blob=malformed)))
    assert await blamed(stage, task) == {maker.peer_id if is_guilty else STRANGER}


async def test_node_serves_its_results_and_not_what_it_fetched(tmp_path: Path) -> None:
    """Otherwise a stranger could let it hold a malformed blob, and name it as the maker elsewhere."""
    stage = AttackedStage(tmp_path)
    served, given = ServedActivations(stage.activations), stage.activation(1)
    stage.node.answer(stage.task(0, "forward", given))
    await stage.settle()
    ((_, outcome),) = stage.calls.outcomes
    assert outcome.result is not None and served.has(outcome.result.digest)
    assert stage.activations.store.has(given.digest) and not served.has(given.digest)
    assert served.blob(outcome.result.digest) == outcome.result
    stage.node.release(STRANGER, stage.manifest.run_id, (0,))
    assert not served.has(outcome.result.digest) and not stage.activations._made


async def test_owner_is_to_blame_for_its_tokens(tmp_path: Path) -> None:
    stage = AttackedStage(tmp_path, 2)
    tokens = stage.shelf.put(bytes([255]) * stage.sizes.token_bytes)
    stage.node.answer(stage.task(0, "forward", stage.activation(1), tokens))
    await stage.settle()
    assert await blamed(stage, stage.task(0, "backward", stage.activation(1), tokens)) == {STRANGER}


class HostileTasks:
    """Random tasks from a few blobs, most of them well known, of true and false sizes and holders."""

    def __init__(self, stage: AttackedStage, seed: int) -> None:
        self.stage = stage
        self.draw = random.Random(f"hostile {seed}")
        sizes = stage.sizes.activation_bytes, stage.sizes.token_bytes
        known = [stage.activation(1), stage.activation(2), stage.tokens(3), stage.tokens(4)]
        known += [stage.shelf.put(bytes([255]) * size) for size in sizes]
        known += [Blob(bytes([9]) * 32, size) for size in sizes]
        self.blobs = [*known, *(Blob(blob.digest, size) for blob in known for size in sizes)]

    def make(self) -> Task:
        draw, stage = self.draw, self.stage
        direction = draw.choice(["forward", "backward"])
        task = stage.task(draw.randrange(6), direction, draw.choice(self.blobs), None, draw.choice([STRANGER, ME]))
        inputs: dict[str, HeldBlob] = {}
        for name, size in stage.loop.settings.input_bytes(task.direction).items():
            fitting = [blob for blob in self.blobs if blob.size == size or draw.random() < 0.02]
            inputs[name] = HeldBlob(draw.choice(fitting), draw.choice([HOLDER, ME, STRANGER]))
        return replace(
            task,
            inputs=Inputs(**inputs),
            attempt=draw.randrange(3),
            replay=draw.random() < 0.3,
            number=draw.choice([None, 1]),
        )


async def fuzz(stage: AttackedStage, seed: int) -> None:
    tasks = HostileTasks(stage, seed)
    for _ in range(TASKS):
        stage.node.answer(tasks.make())
        if tasks.draw.random() < 0.5:
            await stage.settle()
        if tasks.draw.random() < 0.1:
            stage.node.release(STRANGER, stage.manifest.run_id, tuple(tasks.draw.sample(range(6), 3)))
        if tasks.draw.random() < 0.05:
            stage.see_owners(OWNER, *([STRANGER] if tasks.draw.random() < 0.5 else []))
    await stage.settle()


@pytest.mark.parametrize("seed", range(4))
async def test_random_tasks_neither_end_nor_wedge_a_stage(tmp_path: Path, seed: int) -> None:
    stage = AttackedStage(tmp_path, 1 + seed % 2, ("fp32", "int8")[seed % 3 == 0])
    free = stage.free_slots
    await fuzz(stage, seed)
    unexpected = [fault for _, fault in stage.directory.refused if "causes an error" in str(fault)]
    assert stage.inbox._fault is None and not unexpected
    assert {"done", "missing"} <= set(stage.statuses(STRANGER)), "the fuzz reaches all ends"
    for peer in (STRANGER, ME):
        stage.node.release(peer, stage.manifest.run_id, tuple(range(6)))
    await stage.settle()
    assert await is_working(stage)
    stage.node.release(OWNER, stage.manifest.run_id, (77,))
    assert stage.loop.server is not None and stage.loop.server.table.memory.used == 0
    assert not stage.loop.server.table.unfinished and stage.free_slots == free


async def test_fuzz_finds_the_old_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    without_boundary(monkeypatch)
    without_inputs_of_forward(monkeypatch)
    stage = AttackedStage(tmp_path, 1)
    await fuzz(stage, 0)
    assert stage.inbox._fault is not None


def test_free_slots_of_tiny_activations_take_no_memory() -> None:
    """The control: a list of the numbers, as it was before."""

    def bytes_of(build: Callable[[], object]) -> int:
        tracemalloc.start()
        kept = build()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
        return size

    slots = range(1_000_000)
    assert bytes_of(lambda: FreeSlots(slots)) < 10_000 < 8_000_000 < bytes_of(lambda: list(slots))
    free = FreeSlots(range(5, 8))
    assert [free.take() for _ in range(3)] == [5, 6, 7] and len(free) == 0
    free.give_back(6)
    assert len(free) == 1 and free.take() == 6


def results_against(liar: Identity, others: list[Identity], run: str) -> Contradiction:
    """Return a false result of one server, and the true ones of others."""
    question = StageQuestion(3, bytes(32), "forward", (b"\1" * 32, b"", b""), "cpu")
    values = {maker.peer_id: ResultValue(Blob.of(b"true"), None) for maker in others}
    values[liar.peer_id] = ResultValue(Blob.of(b"false"), None)
    return Contradiction(
        run, tuple(sign_result(each, run, StageResult(question, values[each.peer_id])) for each in (liar, *others))
    )


async def test_proof_of_a_false_result_excludes_its_maker_and_is_passed_on_once(tmp_path: Path) -> None:
    stage = AttackedStage(tmp_path)
    liar, *others = (Identity.create() for _ in range(3))
    found = results_against(liar, others, stage.manifest.run_id)
    with pytest.raises(StaleError):
        stage.node.take_contradiction(found.to_wire())  # no voters are known
    voters = frozenset(each.peer_id for each in (liar, *others))
    stage.node.admitted.learn(stage.manifest.stage, Electorate(OPEN, 9, voters, {}))
    for _ in range(2):
        stage.node.take_contradiction(found.to_wire())
        await stage.settle()
    assert stage.node.admitted.contradicted == {liar.peer_id}
    assert {peer for peer, _ in stage.calls.contradictions} == {HOLDER, OWNER, STRANGER}
    assert len(stage.calls.contradictions) == 3 and stage.calls.contradictions[0][1] == found
    assert [peer for peer, _ in stage.directory.refused] == [liar.peer_id]
    with pytest.raises(MalformedError):
        stage.node.take_contradiction(results_against(liar, others, "cd" * 32).to_wire())


async def test_owner_excludes_by_the_results_of_its_audit(tmp_path: Path) -> None:
    stage = AttackedStage(tmp_path)
    liar, *others = (Identity.create() for _ in range(3))
    found = results_against(liar, others, stage.manifest.run_id)
    action = ResultsDiffer(stage.manifest.stage, frozenset({liar.peer_id}), found.results)
    stage.stage._run(action)
    assert not stage.node.admitted.contradicted, "nobody has a vote yet"
    voters = frozenset(each.peer_id for each in (liar, *others))
    stage.node.admitted.learn(stage.manifest.stage, Electorate(OPEN, 9, voters, {}))
    file = stage.node._contradictions = ContradictionFile(tmp_path / "contradictions.json")
    stage.stage._run(action)
    assert stage.node.admitted.contradicted == {liar.peer_id}
    while not (tmp_path / "contradictions.json").exists():
        await asyncio.sleep(0.01)
    assert [each.found.liar for each in file.load({stage.manifest.run_id})] == [liar.peer_id]

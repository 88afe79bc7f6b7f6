"""What fits into how much memory."""

from typing import get_args

import pytest

from node.model import Cut
from node.model.interface import Recompute
from node.model.memory_estimate import fit_microbatch, fixed_bytes, max_microbatch, microbatch_bytes
from protocol.errors import DeviceError
from protocol.manifest.sections import PipelineSection
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST


def room_for(sequences: int) -> int:
    return fixed_bytes(MANIFEST, "cpu") + microbatch_bytes(MANIFEST, sequences, "cpu")


def test_more_memory_takes_larger_microbatches() -> None:
    sizes = [max_microbatch(MANIFEST, room_for(count), "cpu") for count in (0, 1, 5, 1000, 10**6)]
    assert sizes == [0, 1, 5, 1000, 4096]
    assert max_microbatch(MANIFEST, 0, "cpu") == 0
    assert microbatch_bytes(MANIFEST, 1, "cuda") < microbatch_bytes(MANIFEST, 1, "cpu")


def test_the_runs_own_is_never_exceeded() -> None:
    own = MANIFEST.train.microbatch
    assert fit_microbatch(MANIFEST, None, "cpu") == own
    assert fit_microbatch(MANIFEST, room_for(10 * own), "cpu") == own
    assert fit_microbatch(MANIFEST, room_for(own - 1), "cpu") == own - 1


def test_what_does_not_fit_is_refused_and_what_the_refusal_names_is_enough() -> None:
    with pytest.raises(DeviceError, match=r"--memory: 1 MB are too little .*; allow (\d+)MB") as refused:
        fit_microbatch(MANIFEST, 1_000_000, "cpu")
    named = int(str(refused.value).rpartition("allow ")[2].partition("MB")[0])
    assert fit_microbatch(MANIFEST, (named + 1) * 1_000_000, "cpu") >= 1


def test_a_node_of_a_pipeline_needs_room_for_a_whole_microbatch_of_one_stage() -> None:
    model = MANIFEST.model.model_copy(update={"layers": 4, "tied": False})
    pipeline = PipelineSection(stages=4, microbatch=3)
    train = MANIFEST.train.model_copy(update={"batch_tokens": 6 * model.context})
    whole = MANIFEST.model_copy(update={"model": model, "train": train})
    cut = whole.model_copy(update={"pipeline": pipeline})
    assert fixed_bytes(cut, "cuda") < fixed_bytes(whole, "cuda") / 3
    stages = [StageManifest.of(cut, stage) for stage in range(4)]
    assert min(fixed_bytes(stage, "cuda") for stage in stages) == fixed_bytes(cut, "cuda")
    assert fixed_bytes(stages[0], "cuda") == fixed_bytes(whole, "cuda", Cut(0, 4))
    for manifest in (cut, stages[1]):
        room = fixed_bytes(manifest, "cpu") + microbatch_bytes(manifest, 3, "cpu")
        assert fit_microbatch(manifest, room, "cpu") == fit_microbatch(manifest, None, "cpu") == 3
        with pytest.raises(DeviceError, match="a microbatch of 3 takes"):
            fit_microbatch(manifest, room - 1, "cpu")


def test_recomputed_activations_and_chunks_of_logits_make_room_for_more() -> None:
    model = MANIFEST.model.model_copy(update={"layers": 12, "width": 512, "hidden": 1408, "heads": 8, "context": 1024})
    manifest = MANIFEST.model_copy(update={"model": model})
    everything, products, inputs = (
        microbatch_bytes(manifest, 4, "cuda", recompute=recompute) for recompute in get_args(Recompute)
    )
    assert inputs < products / 2 < everything / 4
    room = fixed_bytes(manifest, "cuda") + microbatch_bytes(manifest, 2, "cuda")
    fitting = [fit_microbatch(manifest, room, "cuda", recompute) for recompute in get_args(Recompute)]
    assert fitting == sorted(set(fitting)) and fitting[0] == 2
    large = manifest.model_copy(update={"model": model.model_copy(update={"vocabulary": 2**17})})
    more = [microbatch_bytes(large, count, "cpu") - microbatch_bytes(manifest, count, "cpu") for count in (1, 8)]
    assert more[1] <= more[0], "the logits of a chunk"


def test_ranks_hold_a_part_each_and_some_layers_whole() -> None:
    model = MANIFEST.model.model_copy(update={"layers": 64})
    deep = MANIFEST.model_copy(update={"model": model})
    alone, *parts = (fixed_bytes(deep, "cuda", ranks=ranks) for ranks in (1, 2, 4))
    assert alone / 2 < parts[0] < 0.7 * alone and alone / 4 < parts[1] < 0.45 * alone
    room = alone + microbatch_bytes(deep, 1, "cuda")
    assert fit_microbatch(deep, room, "cuda") == 1 < fit_microbatch(deep, room, "cuda", ranks=2)

"""Randomized pipelines in virtual time: what they train, and what becomes of microbatches."""

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.loop.stage_loop import StageLoop, build_stage_loop
from node.simulation.config import SimulationConfig, with_stages
from node.simulation.measurement import CurveRecorder, Evaluator
from node.simulation.pipeline import MicrobatchTrainer, PipelineSwarm, name_of
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.stage import Computation
from protocol.errors import ManifestError
from protocol.manifest.sections import PipelineSection
from protocol.pipeline.messages import Input, Key
from protocol.pipeline.server_events import Compute
from protocol.pipeline.stage import StageManifest
from tests.node.simulation.virtual_swarm import BATCH, MODEL, Tables, make_config, make_corpus, make_method

pytestmark = pytest.mark.slow

PLAIN: Tables = {"codec": {"kind": "none"}}


def pipelined(
    stages: int, peers: int, steps: int, *, microbatch: int = 1, in_flight: int = 8, **options: object
) -> SimulationConfig:
    model = MODEL.model_copy(update={"tied": False, "layers": max(2, stages)})
    config = make_config(peers, steps, model=model, **options)  # type: ignore[arg-type]
    pipeline = PipelineSection(stages=stages, microbatch=microbatch, activations="fp32", in_flight=in_flight)
    train = config.manifest.train.model_copy(update={"microbatch": microbatch, "clip": 1e6})
    return replace(config, manifest=config.manifest.model_copy(update={"pipeline": pipeline, "train": train}))


def run(config: SimulationConfig, tables: Tables = PLAIN) -> PipelineSwarm:
    corpus = make_corpus()
    recorder = CurveRecorder(Evaluator(config, corpus), 1)
    swarm = PipelineSwarm(config, make_method("averaging", 3, tables), corpus, recorder, lambda: None)
    swarm.run()
    return swarm


def anchor(swarm: VirtualSwarm) -> Tensor:
    return swarm.live_peers[0].applied_state[0].anchor


def joined(swarm: PipelineSwarm) -> Tensor:
    return torch.cat([anchor(stage) for stage in swarm.stages])


def let_the_first_stage_own_all(patch: pytest.MonkeyPatch) -> None:
    def build(manifest: StageManifest, me: str, first: int, rng: random.Random, *, draws: bool) -> StageLoop:
        return build_stage_loop(manifest, me, first, rng, draws=manifest.stage == 0)

    patch.setattr("node.simulation.pipeline.build_stage_loop", build)


def test_stages_with_one_peer_each_train_the_bits_of_one_peer_with_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_the_first_stage_own_all(monkeypatch)
    # Two microbatches a step, because the order of more changes their sum, and two in flight, for the text's order.
    config = pipelined(3, 1, 6, microbatch=2, in_flight=2)
    whole = VirtualSwarm(config, make_method("averaging", 3, PLAIN), make_corpus(), lambda *_: None, lambda: None)
    whole.run()
    swarm = run(config)
    assert torch.equal(joined(swarm), anchor(whole))
    rounding = config.manifest.pipeline.model_copy(update={"activations": "bf16"})
    coarse = replace(config, manifest=config.manifest.model_copy(update={"pipeline": rounding}))
    assert not torch.equal(joined(run(coarse)), anchor(whole))


def test_each_stage_clips_at_its_share_of_the_norm() -> None:
    config = pipelined(4, 1, 3, microbatch=2)
    manifest = config.manifest.model_copy(update={"train": config.manifest.train.model_copy(update={"clip": 0.01})})
    swarm = run(replace(config, manifest=manifest))
    trainers = [stage.live_peers[0].trainer for stage in swarm.stages]
    assert [trainer.train.clip for trainer in trainers if trainer] == [0.005] * 4


def test_stages_agree_on_chains_of_their_own_and_count_all_tokens() -> None:
    swarm = run(pipelined(2, 2, 6))
    peers = [stage.live_peers[0] for stage in swarm.stages]
    assert len({stage.run_id for stage in swarm.stages} | {swarm.stages[0].config.manifest.run_id}) == 3
    assert len({peer.chain.head.digest for peer in peers}) == 2
    for stage in swarm.stages:
        assert {peer.chain.head.digest for peer in stage.live_peers} == {stage.live_peers[0].chain.head.digest}
        assert stage.live_peers[0].chain.tokens >= 6 * 2 * BATCH
    counts = swarm.result(1.0).counts
    assert counts.done >= 6 * 2 * BATCH // MODEL.context and not (
        counts.lost or counts.partly_counted or counts.replayed
    )


def test_faster_peers_carry_more() -> None:
    swarm = run(replace(pipelined(2, 2, 8, in_flight=64, speeds=(1.0, 3.0)), latency=0.01))
    for stage in swarm.stages:
        processes = {peer.slot: swarm.world.processes[name_of(peer)] for peer in stage.live_peers}
        computed = {
            slot: process.loop.server.counts.computed for slot, process in processes.items() if process.loop.server
        }
        assert computed[1] > 1.4 * computed[0], computed


def test_deaths_lose_counted_microbatches_and_no_stage_counts_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[tuple[int, Key], set[str]] = defaultdict(set)
    compute = MicrobatchTrainer.compute

    def observed(self: MicrobatchTrainer, order: Compute, inputs: Mapping[Input, object]) -> Computation:
        if order.adds:
            added[self._sizes.stage, order.task.key].add(name_of(self._peer))
        return compute(self, order, inputs)

    monkeypatch.setattr(MicrobatchTrainer, "compute", observed)
    swarm = run(pipelined(3, 4, 16, churn=0.25))
    counts = swarm.result(1.0).counts
    assert counts.lost > 0 and counts.replayed > 0, counts
    living = {name_of(peer) for stage in swarm.stages for peer in stage.live_peers}
    assert not [place for place, peers in added.items() if len(peers & living) > 1]
    assert swarm.world.processes.keys() >= living


def test_stages_leave_out_the_experts_that_they_have_hardly_trained() -> None:
    """Control: with the default of the schedule they send all of them."""
    config = pipelined(2, 2, 6)
    experts = {"kind": "qwen3-moe", "experts": 8, "experts_per_token": 1, "balance_loss": 0.0}
    model = config.manifest.model.model_copy(update=experts)
    config = replace(config, manifest=config.manifest.model_copy(update={"model": model}))
    some, everything = (
        [stage.accounting.contribution_bits for stage in run(config, tables={**PLAIN, "schedule": chosen}).stages]
        for chosen in ({"experts": "trained"}, {})
    )
    assert all(0 < bits < 0.97 * full for bits, full in zip(some, everything, strict=True)), (some, everything)


def test_same_seed_gives_the_same_weights() -> None:
    first, second = (joined(run(pipelined(2, 3, 4, churn=0.3))) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, joined(run(pipelined(2, 3, 4, churn=0.3, seed=1))))


def test_a_manifest_without_a_pipeline_gets_four_microbatches_a_step() -> None:
    manifest = make_config(2, 3, model=MODEL.model_copy(update={"tied": False, "layers": 2})).manifest
    assert with_stages(manifest, 1) is manifest
    assert with_stages(manifest, 2).pipeline.microbatch == BATCH // MODEL.context // 4
    with pytest.raises(ManifestError, match=r"pipeline\.stages"):
        with_stages(manifest, 3)
    tied = manifest.model_copy(update={"model": MODEL.model_copy(update={"layers": 2})})
    with pytest.raises(ManifestError, match=r"model\.tied"):
        with_stages(tied, 2)

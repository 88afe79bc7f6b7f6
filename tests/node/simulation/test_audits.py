"""Audits of virtual peers: honest work agrees to the last bit in every recipe, and every kind of lie is found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from node.daemon.audits.work_log import InnerState
from node.data import Corpus
from node.simulation.adversary import Adversaries, LieKind
from node.simulation.swarm import VirtualSwarm
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import step_settings
from node.trainer.ipc.channel import ContributionHeader
from optim.method import Method
from optim.recipes import RECIPES
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import AuditSection, DataSection, PhaseSection, SourceSection
from tests.node.simulation.test_swarm import BLOCKS, shortened
from tests.node.simulation.virtual_swarm import BATCH, make_config, make_corpus, make_method

pytestmark = pytest.mark.slow

LIES: tuple[LieKind, ...] = (
    "sign-flip", "scale10", "zero", "random", "fewer-steps", "wrong-data", "stale-replay",
)  # fmt: skip
AUDITABLE = [recipe for recipe in RECIPES if shortened(recipe).topology.kind != "groups"]


def audited_swarm(
    method: Method,
    peers: int,
    steps: int,
    share: float = 1.0,
    lie: LieKind | None = None,
    model: ModelSection = BLOCKS,
) -> VirtualSwarm:
    speeds = (1.0, 1.0, 1.3, 0.8, 1.0)[:peers]
    config = make_config(peers, steps, speeds=speeds, model=model)
    manifest = config.manifest.model_copy(update={"audits": AuditSection(share=share)})
    liars = None if lie is None else Adversaries(1 / peers, lie)
    config = replace(config, manifest=manifest, adversaries=liars)
    swarm = VirtualSwarm(config, method, make_corpus(), lambda *_: None, lambda: None)
    swarm.run()
    return swarm


@pytest.mark.parametrize("recipe", AUDITABLE)
def test_repeated_work_of_honest_peers_agrees_to_the_last_bit(recipe: str) -> None:
    audits = audited_swarm(shortened(recipe), 4, 6).audits
    assert audits is not None and audits.verdicts["equal"] >= 2
    assert set(audits.verdicts) == {"equal"}
    assert not audits.caught and not audits.struck


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_repeated_work_leaves_the_same_experts_out(recipe: str) -> None:
    """So an auditor counts the tokens of each expert as the trainer did, from the state before."""
    experts = {"kind": "qwen3-moe", "experts": 8, "experts_per_token": 1, "hidden": 8, "balance_loss": 0.0}
    method = make_method(recipe, 3, {"schedule": {"experts": "trained"}})
    audits = audited_swarm(method, 4, 12, model=BLOCKS.model_copy(update=experts)).audits
    assert audits is not None and audits.verdicts["equal"] >= 4 and set(audits.verdicts) == {"equal"}
    assert not audits.caught and not audits.struck


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_found_and_nobody_else_is_accused(lie: LieKind) -> None:
    swarm = audited_swarm(make_method("sparseloco", 3), 5, 12, lie=lie)
    assert swarm.audits is not None
    (liar,) = (peer.peer_id for peer in swarm.live_peers if peer.slot == 4)
    assert set(swarm.audits.caught) == {liar}
    assert set(swarm.audits.struck) <= {"audit: doubted"}, "the liar, before all had repeated its work"


def mixing_swarm() -> VirtualSwarm:
    """Run a swarm whose peers read two sources, with other weights from half of the run on."""
    method, text = make_method("sparseloco", 2), make_corpus()
    sources = [SourceSection(name=name, source="text", weight=weight) for name, weight in (("a", 1.0), ("b", 3.0))]
    phase = PhaseSection(tokens=8 * BATCH, weights={"a": 5.0, "b": 1.0})
    config = make_config(3, 8)
    manifest = config.manifest.model_copy(
        update={"audits": AuditSection(share=1.0), "data": DataSection(sources=tuple(sources), phases=(phase,))}
    )
    corpus = Corpus(tuple(replace(text.sources[0], config=source) for source in sources))
    swarm = VirtualSwarm(replace(config, manifest=manifest), method, corpus, lambda *_: None, lambda: None)
    swarm.run()
    return swarm


def test_auditor_draws_from_the_sources_by_the_weights_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    audits = mixing_swarm().audits
    assert audits is not None and set(audits.verdicts) == {"equal"} and audits.verdicts["equal"] >= 4
    monkeypatch.setattr(
        "node.simulation.virtual.audits.step_settings", lambda manifest, *_: step_settings(manifest, 0, 0)
    )
    forgetful = mixing_swarm().audits
    assert forgetful is not None and forgetful.verdicts["different"] >= 1, "the negative control"


def test_only_a_share_is_audited() -> None:
    swarm = audited_swarm(make_method("diloco", 1), 5, 20, share=0.1)
    assert swarm.audits is not None
    assert 2 <= sum(swarm.audits.verdicts.values()) <= 25  # 10 of 100 are expected


def inflate_residual(trainer: VirtualTrainer, header: ContributionHeader) -> None:
    trainer.state.residual.add_(1.0)


def test_peer_that_invents_an_inner_state_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after its last contribution is another one: a made-up residual would be sent as if it were work."""
    monkeypatch.setattr("node.simulation.virtual.audits.PeerAudits.record_work", cheating_after(inflate_residual))
    swarm = audited_swarm(make_method("sparseloco", 3), 4, 12)
    assert swarm.audits is not None
    assert swarm.audits.verdicts["equal"] < sum(swarm.audits.verdicts.values())
    assert swarm.audits.caught


def cheating_after(cheat: Callable[[VirtualTrainer, ContributionHeader], None]) -> Callable[..., object]:
    """Let the peer of slot 0 change its state before it commits to it."""
    from node.simulation.virtual.audits import PeerAudits

    honest, cheats = PeerAudits.record_work, list[VirtualTrainer]()

    def record(self: PeerAudits, trainer: VirtualTrainer, header: ContributionHeader) -> object:
        if not cheats:
            cheats.append(trainer)
        if trainer is cheats[0]:
            cheat(trainer, header)
        return honest(self, trainer, header)

    return record


def test_state_survives_its_bytes() -> None:
    swarm = audited_swarm(make_method("sparseloco", 4), 4, 4)
    trainer = swarm.live_peers[0].trainer
    assert trainer is not None
    trainer.make_contribution()
    trainer.state.save()
    state = InnerState.copy_of(trainer.shared_memory, trainer.state.counters.messages)
    assert state is not None
    raw = bytearray(b"".join(bytes(piece) for piece in state.to_bytes()))
    again = InnerState.from_bytes(raw, trainer.shared_memory.layout)
    assert again.counters == state.counters.model_copy(update={"seconds": {}}) and again.outbox == state.outbox
    assert all(torch.equal(again.vectors[name], vector) for name, vector in state.vectors.items())
    assert Counter(len(vector) for vector in again.vectors.values())

"""A generator draws what everybody can check, and draws it again after its death."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.data.questions import QuestionEncoder
from node.model import build_model, initial_weights
from node.monitoring.status import first_status
from node.rollout.__main__ import draw_groups, read_anchor
from node.rollout.command import _publish_figures
from node.rollout.generator import DrawRequest, GeneratorConfig, GeneratorProcess
from optim.rollouts import is_exact, margins_of, noise_key
from protocol.errors import MissingFileError, MurmurError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import ReinforcementSection
from protocol.rollout_groups import GroupLimits, Place, noise_parts, question_of
from protocol.scored_tasks import TASKS

ME = "12D3KooWMaker"
RL = ReinforcementSection(task="reverse", answer_tokens=8, group=3)
RUN = load_manifest(Path(__file__).parents[3] / "configs" / "test.toml").model_copy(update={"rl": RL})
PLACES = [Place(4, 0), Place(4, 1)]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.model_validate_json(RUN.model_dump_json(exclude_none=True))


def test_each_token_of_a_group_is_the_one_that_the_public_noise_draws(manifest: Manifest) -> None:
    model, encoder = build_model(manifest.model), QuestionEncoder(manifest, Path())
    model.load_flat(initial_weights(manifest.model, 1))
    drawn = draw_groups(model, encoder, manifest, ME, PLACES)
    assert [group.serial for group in drawn] == [0, 1]
    for place, group in zip(PLACES, drawn, strict=True):
        GroupLimits.of(manifest, 1).check(group.to_group(place.round, "cpu").to_wire())
        prompt = encoder.prompt(question_of(TASKS["reverse"], manifest.run_id, ME, place))
        for sample, (tokens, given) in enumerate(zip(group.tokens, group.log_probabilities, strict=True)):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].float()[:, encoder.usable]
            claimed, key = torch.tensor(tokens), noise_key(*noise_parts(manifest.run_id, ME, place, sample))
            assert is_exact(margins_of(logits, RL.temperature, key, claimed, encoder.usable))
            found = torch.log_softmax(logits, -1).gather(1, claimed[:, None])[:, 0]
            assert torch.allclose(found, torch.tensor(given), atol=1e-4)
    other = draw_groups(model, encoder, manifest, "12D3KooWOther", PLACES)
    assert other != drawn, "nobody makes the groups of somebody else"


def test_state_that_is_gone_or_cut_is_said(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(MissingFileError):
        read_anchor(path, 4)
    torch.arange(6, dtype=torch.float32).numpy().tofile(path)
    assert read_anchor(path, 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(MissingFileError, match="not whole"):
        read_anchor(path, 7)


@pytest.fixture
def request_of(manifest: Manifest, tmp_path: Path) -> DrawRequest:
    initial_weights(manifest.model, 1).numpy().tofile(tmp_path / "state")
    return DrawRequest(round=4, state=tmp_path / "state", serials=(0, 1))


def config(manifest: Manifest, device: str = "cpu") -> GeneratorConfig:
    return GeneratorConfig(manifest=manifest.to_toml(), base=Path("/"), maker=ME, device=device, threads=1)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_generator_that_is_killed_draws_the_same_groups_again(
    manifest: Manifest, request_of: DrawRequest, tmp_path: Path
) -> None:
    generator = GeneratorProcess(config(manifest))
    first = await generator.draw(request_of)
    assert first.device and len(first.groups) == 2
    process = generator._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    again = await generator.draw(request_of)
    assert again.groups == first.groups and generator.deaths == 1 and not generator.trouble
    gone = await generator.draw(request_of.model_copy(update={"round": 5, "state": tmp_path / "gone"}))
    assert gone.lacks_state
    last = generator._process
    await generator.stop()
    assert last is not None and last.returncode is not None, "nothing is left behind"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_generator_that_cannot_start_ends_the_peer_with_its_reason(
    manifest: Manifest, request_of: DrawRequest
) -> None:
    generator = GeneratorProcess(config(manifest, "cuda:99"))
    with pytest.raises(MurmurError, match="no CUDA device|there is no cuda:99"):
        await generator.draw(request_of)
    await generator.stop()


async def test_record_of_a_rollout_peer_has_its_figures_after_each_batch() -> None:
    made, updates = asyncio.Event(), asyncio.Queue[dict[str, object]]()
    node = SimpleNamespace(directory=SimpleNamespace(update=lambda **fields: updates.put_nowait(fields)))
    figures = first_status(RUN, ME, "").model_copy(update={"tokens_per_second": 7.0, "rollouts": {"groups taken": 3}})
    status = SimpleNamespace(status=lambda: figures)
    publishing = asyncio.create_task(_publish_figures(node, status, SimpleNamespace(has_made=made)))  # type: ignore[arg-type]
    for _ in range(2):
        assert updates.empty()
        made.set()
        async with asyncio.timeout(10):
            fields = await updates.get()
        assert (fields["tokens_per_second"], fields["rollouts"]) == (7.0, 3)
    publishing.cancel()

"""A trainer refuses groups that were not drawn as the run prescribes, and learns from the others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.data.questions import QuestionEncoder
from node.model import LanguageModel, build_model
from node.model.generate import Sampling, complete
from node.model.initialization import initial_weights
from node.trainer.devices.device import device_class
from node.trainer.ipc.rollout_messages import GroupVerdict
from node.trainer.reinforcement import OTHER_DRAWS, OTHER_TOKEN, OTHER_VALUES, WEIGHTS_GONE, RolloutLearner
from optim.rollouts import noise_key
from protocol.errors import DataError
from protocol.identity import Identity
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.rollout_groups import DrawnAnswer, Place, RolloutGroup, noise_parts, question_of
from protocol.scored_tasks import TASKS, Question
from tests.protocol.test_rollouts import RL

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = Path()
CPU = device_class(torch.device("cpu"))
ELSEWHERE = "cpu of another kind"
MAKER = Identity.create().peer_id
SMALL = RL
for old, new in (
    ("width = 128", "width = 32"), ("layers = 4", "layers = 2"), ("hidden = 344", "hidden = 64"),
    ("context = 128", "context = 64"), ("group = 2", "group = 8"),
):  # fmt: skip
    SMALL = SMALL.replace(old.encode(), new.encode())
MANIFEST = parse_manifest(SMALL, "run.toml")
ENCODER = QuestionEncoder(MANIFEST, HERE)


def sharp_model(seed: int) -> LanguageModel:
    """Build a model whose draws are neither uniform nor certain, like those of a trained one."""
    model = build_model(MANIFEST.model)
    model.load_flat(initial_weights(MANIFEST.model, seed) * 3)
    return model


def draw(
    model: LanguageModel,
    place: Place,
    temperature: float = 1.0,
    question: Question | None = None,
    noise_place: Place | None = None,
    device: str = CPU,
    run_id: str = MANIFEST.run_id,
) -> RolloutGroup:
    """Draw a group, by default as the run prescribes."""
    question = question or question_of(TASKS["reverse"], run_id, MAKER, place)
    prompt = ENCODER.prompt(question)
    keys = [noise_key(*noise_parts(run_id, MAKER, noise_place or place, sample)) for sample in range(8)]
    drawn = complete(
        model, [prompt] * 8, 12, Sampling(temperature), ENCODER.usable, ENCODER.stops, keys, keeps_stops=True
    )
    answers = tuple(DrawnAnswer(tuple(each.tokens), tuple(each.log_probabilities)) for each in drawn)
    return RolloutGroup(place.round, place.serial, device, answers)


def learner_of(model: LanguageModel, manifest: Manifest = MANIFEST) -> RolloutLearner:
    learner = RolloutLearner(manifest, HERE, model, CPU)
    learner.keep_policy(3, model.flat)
    return learner


def judge(learner: RolloutLearner, *groups: RolloutGroup, round_number: int = 3) -> list[GroupVerdict]:
    for group in groups:
        learner.receive(MAKER, group.to_wire().SerializeToString())
    verdicts = list[GroupVerdict]()
    while learner.waiting:
        verdicts += learner.learn(round_number, 8, (), None).report.verdicts
    return verdicts


def coarse(model: LanguageModel) -> LanguageModel:
    """Round each matrix to 8 bits, with one scale for each row."""
    rounded = sharp_model(0)
    rounded.load_flat(model.flat.detach().clone())
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
                parameter.copy_((parameter / scale).round() * scale)
    return rounded


def edit(group: RolloutGroup) -> RolloutGroup:
    """Change the first token of the first answer of several tokens."""
    answers = list(group.answers)
    place = next(number for number, each in enumerate(answers) if len(each.tokens) > 1)
    first, *others = answers[place].tokens
    answers[place] = replace(answers[place], tokens=(first % 200 + 20, *others))
    return replace(group, answers=tuple(answers))


def invent(group: RolloutGroup) -> RolloutGroup:
    """Claim that every token was certain."""
    answers = (replace(each, log_probabilities=(0.0,) * len(each.tokens)) for each in group.answers)
    return replace(group, answers=tuple(answers))


def cheat(kind: str, model: LanguageModel, place: Place, device: str) -> RolloutGroup:
    own = draw(model, place, device=device)
    other = Place(place.round, place.serial + 1)
    cheats: dict[str, Callable[[], RolloutGroup]] = {
        "greedy": lambda: draw(model, place, 0.0, device=device),
        "temperature": lambda: draw(model, place, 0.7, device=device),
        "older policy": lambda: draw(sharp_model(7), place, device=device),
        "int8": lambda: draw(coarse(model), place, device=device),
        "edited token": lambda: edit(own),
        "copy": lambda: replace(draw(model, other, device=device), serial=place.serial),
        "wrong prompt": lambda: draw(
            model, place, question=question_of(TASKS["reverse"], MANIFEST.run_id, MAKER, other), device=device
        ),
        "other noise": lambda: draw(model, place, noise_place=other, device=device),
        "invented log probabilities": lambda: invent(own),
    }
    return cheats[kind]()


EVERYWHERE = [
    "greedy",
    "older policy",
    "edited token",
    "copy",
    "wrong prompt",
    "other noise",
    "invented log probabilities",
]


def test_honest_groups_are_learned_from_on_every_device() -> None:
    model = sharp_model(1)
    groups = [draw(model, Place(3, serial), device=CPU if serial % 2 else ELSEWHERE) for serial in range(6)]
    assert [each.refusal for each in judge(learner_of(model), *groups)] == [""] * 6


def test_honest_bf16_passes_the_test_of_other_devices() -> None:
    model = sharp_model(1)
    with torch.autocast("cpu", torch.bfloat16):
        groups = [draw(model, Place(3, serial), device=ELSEWHERE) for serial in range(6)]
    assert [each.refusal for each in judge(learner_of(model), *groups)] == [""] * 6


@pytest.mark.parametrize("kind", [*EVERYWHERE, "temperature", "int8"])
def test_cheats_on_a_device_of_the_same_class_are_proved(kind: str) -> None:
    model = sharp_model(1)
    verdicts = judge(learner_of(model), *(cheat(kind, model, Place(3, serial), CPU) for serial in range(3)))
    assert {each.refusal for each in verdicts} <= {OTHER_TOKEN, OTHER_VALUES}
    assert all(each.is_proof for each in verdicts)


@pytest.mark.parametrize("kind", [*EVERYWHERE, "temperature"])
def test_cheats_on_other_devices_fail_the_sum(kind: str) -> None:
    model = sharp_model(1)
    verdicts = judge(learner_of(model), *(cheat(kind, model, Place(3, serial), ELSEWHERE) for serial in range(5)))
    refused = [each.refusal for each in verdicts if each.refusal]
    assert len(refused) >= 3, "as many as end a maker"
    assert set(refused) <= {OTHER_DRAWS, OTHER_VALUES}
    assert not any(each.is_proof for each in verdicts)


def test_scorers_see_only_what_was_drawn_as_the_run_prescribes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, ...]]()

    def score(_: QuestionEncoder, asked: Question, tokens: tuple[int, ...]) -> float:
        seen.append(tokens)
        return 0.0

    monkeypatch.setattr(QuestionEncoder, "score", score)
    model = sharp_model(1)
    judge(learner_of(model), edit(draw(model, Place(3, 0))), draw(model, Place(2, 0)))
    assert not seen, "an edited answer, and one of weights that are gone"
    judge(learner_of(model), draw(model, Place(3, 1)))
    assert len(seen) == 8


def test_answer_that_goes_on_after_its_stop_or_ends_before_is_refused() -> None:
    model = sharp_model(1)
    group = draw(model, Place(3, 0))
    short = replace(group, answers=(*group.answers[:-1], DrawnAnswer((65,), (-1.0,))))
    long = replace(group, answers=(*group.answers[:-1], DrawnAnswer((10, 65), (-1.0, -1.0))))
    assert [each.is_proof for each in judge(learner_of(model), short, long)] == [True, True]


def test_group_of_weights_that_are_gone_is_nobodys_fault() -> None:
    model = sharp_model(1)
    (verdict,) = judge(learner_of(model), draw(model, Place(2, 0)))
    assert verdict.refusal == WEIGHTS_GONE
    assert verdict.is_unchecked


def test_older_group_is_checked_by_the_weights_that_drew_it() -> None:
    older, model = sharp_model(7), sharp_model(1)
    learner = RolloutLearner(MANIFEST, HERE, model, CPU)
    learner.keep_policy(2, older.flat)
    learner.keep_policy(3, model.flat)
    before = model.flat.clone()
    verdicts = judge(
        learner, draw(older, Place(2, 0)), draw(model, Place(3, 0)), replace(draw(model, Place(3, 1)), round=2)
    )
    assert [bool(each.refusal) for each in verdicts] == [False, False, True]
    assert [each.age for each in verdicts] == [1, 0, 1]
    assert torch.equal(model.flat, before), "the check leaves the weights in training alone"


def test_policies_older_than_the_oldest_group_are_dropped() -> None:
    model = sharp_model(1)
    learner = learner_of(model)
    for number in range(4, 9):
        learner.keep_policy(number, model.flat)
    assert judge(learner, draw(model, Place(3, 0)), round_number=8)[0].is_unchecked
    assert not judge(learner, draw(model, Place(4, 0)), round_number=8)[0].refusal
    learner.keep_policy(6, model.flat, is_other_chain=True)
    assert judge(learner, draw(model, Place(5, 0)), round_number=6)[0].is_unchecked


def odd_and_even(seed: int) -> tuple[int, LanguageModel, RolloutGroup] | None:
    """Return a model that draws answers of both kinds, with its seed and the answers; None if it draws one kind."""
    model = sharp_model(seed)
    group = draw(model, Place(3, 0))
    return (seed, model, group) if len({each.tokens[0] % 2 for each in group.answers}) == 2 else None


def preference(model: LanguageModel, prompt: list[int], group: RolloutGroup) -> float:
    """Return by how many nats the answers that begin with an odd token are likelier than the others, on average."""
    likelihoods: dict[int, list[float]] = {0: [], 1: []}
    for answer in group.answers:
        tokens = torch.tensor(answer.tokens)
        logits = model(torch.tensor([[*prompt, *answer.tokens]]))[0, len(prompt) - 1 : -1, :256].float()
        found = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])
        likelihoods[answer.tokens[0] % 2].append(float(found.detach().sum()))
    return float(torch.tensor(likelihoods[1]).mean() - torch.tensor(likelihoods[0]).mean())


def test_gradient_raises_the_probability_of_better_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, model, group = next(found for found in map(odd_and_even, range(1, 50)) if found is not None)
    question = question_of(TASKS["reverse"], MANIFEST.run_id, MAKER, Place(3, 0))
    learner = learner_of(model)
    monkeypatch.setattr(QuestionEncoder, "score", lambda _, asked, tokens: float(tokens[0] % 2))
    learner.receive(MAKER, group.to_wire().SerializeToString())
    made = learner.learn(3, 3, (), None)
    assert made.has_gradient
    assert made.report.mismatch == pytest.approx(0.0, abs=1e-6)
    assert made.report.effective == pytest.approx(1.0, abs=1e-4)
    assert model.flat_gradient is not None
    before = preference(model, ENCODER.prompt(question), group)
    model.load_flat(model.flat - 0.01 * model.flat_gradient)
    assert preference(model, ENCODER.prompt(question), group) > before


def slow_gradient(model: LanguageModel, prompt: list[int], group: RolloutGroup, entropy: float) -> torch.Tensor:
    """Compute that of REINFORCE with the mean of the group as its baseline, one answer at a time."""
    rewards = [float(answer.tokens[0] % 2) for answer in group.answers]
    model.attach_gradient()
    loss = torch.zeros(())
    for answer, reward in zip(group.answers, rewards, strict=True):
        logits = model(torch.tensor([[*prompt, *answer.tokens]]))[0, len(prompt) - 1 : -1].float()[:, ENCODER.usable]
        spread = torch.log_softmax(logits, dim=-1)
        places = torch.searchsorted(ENCODER.usable, torch.tensor(answer.tokens))
        loss = loss - (reward - sum(rewards) / len(rewards)) * spread.gather(1, places[:, None]).sum()
        loss = loss + entropy * (spread * spread.exp()).sum()
    torch.autograd.backward(loss / group.tokens)
    assert model.flat_gradient is not None
    gradient = model.flat_gradient.clone()
    model.clear_gradient()
    return gradient


@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_gradient_of_fresh_groups_is_that_of_plain_reinforce(entropy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = parse_manifest(SMALL + f"entropy = {entropy}\n".encode(), "run.toml")
    monkeypatch.setattr(QuestionEncoder, "score", lambda _, asked, tokens: float(tokens[0] % 2))
    model = sharp_model(1)
    groups = (draw(model, Place(3, serial), run_id=manifest.run_id) for serial in range(30))
    group = next(each for each in groups if len({answer.tokens[0] % 2 for answer in each.answers}) == 2)
    prompt = ENCODER.prompt(question_of(TASKS["reverse"], manifest.run_id, MAKER, group.place))
    expected = slow_gradient(model, prompt, group, entropy)
    learner = learner_of(model, manifest)
    learner.receive(MAKER, group.to_wire().SerializeToString())
    assert learner.learn(3, 3, (), None).has_gradient
    assert model.flat_gradient is not None
    torch.testing.assert_close(model.flat_gradient, expected, rtol=1e-3, atol=1e-5)


def test_group_without_variance_is_counted_and_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model(1)
    learner = learner_of(model)
    monkeypatch.setattr(QuestionEncoder, "score", lambda _, asked, tokens: 1.0)
    learner.receive(MAKER, draw(model, Place(3, 4)).to_wire().SerializeToString())
    made = learner.learn(3, 8, (("other", 3, 2), ("old", -5, 9)), None)
    assert (made.has_gradient, made.report.skipped) == (False, 1)
    assert made.tokens > 0
    assert set(made.learned) == {("other", 3, 2), (MAKER, 3, 5)}


def test_trainer_asks_for_two_batches_and_never_for_more() -> None:
    model = sharp_model(1)
    learner = learner_of(model)
    assert learner.request() == 2 * 3
    assert learner.request() == 0
    learner.receive(MAKER, draw(model, Place(3, 0)).to_wire().SerializeToString())
    assert learner.request() == 0
    judge(learner)
    assert learner.request() == 1


def test_questions_that_do_not_fit_are_refused_before_training() -> None:
    manifest = parse_manifest(SMALL.replace(b"answer_tokens = 12", b"answer_tokens = 60"), "run.toml")
    with pytest.raises(DataError, match=r"raise it, or lower rl\.answer_tokens"):
        learner_of(sharp_model(1), manifest)

"""Learn from rollouts: check the groups of other peers, score their answers, and make the gradient of an inner step.

For each group one pass with the weights that its maker names gives log probabilities and margins (`optim.rollouts`):

    exact   on CPUs of the maker's class: each margin and each difference to the claimed log probabilities is rounding,
            or the group is proved not to be drawn as the run prescribes
    sum     of devices of other classes: the margins of 300 tokens of a maker pass `SumTest`, then those of 600, 1,200
            and 2,400 together. Honest devices differ as much as draws of the same texts in bf16

Cards of one class compute other bits in batches of other sizes, so they take the second test. Scores are pure functions
(`protocol.scored_tasks`). A second pass, with the weights in training, gives the gradient of the loss of all answers
whose group has different scores. Groups without variance teach nothing: they are counted, and never fail a step.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from node.data.questions import QuestionEncoder
from node.model import LanguageModel
from node.trainer.devices.device import autocast_context
from node.trainer.inner_step import loaded_weights
from node.trainer.ipc.rollout_messages import GroupVerdict, RolloutSample, RolloutsJudged
from optim.rollouts import (
    POLICY_LOSSES,
    PolicyMetrics,
    SumTest,
    centre_rewards,
    is_exact,
    margins_of,
    mean_entropy,
    noise_key,
    scores_of_text,
)
from protocol import murmur_pb2 as wire
from protocol.errors import DataError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.manifest.sections import MAX_STEPS
from protocol.recent import RecentTable
from protocol.rollout_credits import Credits, RolloutCredit, add_credits
from protocol.rollout_groups import GroupLimits, Place, RolloutGroup, SignedGroup, noise_parts, question_of, require_rl
from protocol.scored_tasks import Question

T = TypeVar("T")
TESTED_TOKENS: Final = 300  # of a maker, at the first test; then twice as many each time
MOST_TESTED_TOKENS: Final = 2400
REFERENCE_TOKENS: Final = 4096  # drawn in bf16 too, among the last rounds' texts
HONEST_TIMES: Final = 4.0  # the margins of bf16, as if logits of honest devices were twice as far apart
EXACT_DIFFERENCE: Final = 2e-3  # nats, of a log probability; honest devices of one class differ by some 1e-5
LARGEST_DIFFERENCE: Final = 1.0  # of one token on another device
MEAN_DIFFERENCE: Final = 0.05
WEIGHTS_GONE: Final = "its weights are not here any more"
OTHER_TOKEN: Final = "a token is not the one that its noise draws"
OTHER_VALUES: Final = "its log probabilities are not those of the weights"
OTHER_DRAWS: Final = "its tokens are not drawn as the run prescribes"
CHECKED_QUESTIONS: Final = 256  # whose prompts must fit into the context
SAMPLE_CHARACTERS: Final = 200
AHEAD: Final = 2  # batches that a trainer asks for, so that it does not wait for its daemon


class ClaimedAnswer(NamedTuple):
    """One answer with its prompt, the key of its noise and its claimed log probabilities."""

    prompt: list[int]
    answer: tuple[int, ...]
    key: int
    claimed: tuple[float, ...]


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its question, and the scores of its answers or why it was refused."""

    maker: PeerId
    group: RolloutGroup
    question: Question
    rows: tuple[ClaimedAnswer, ...]
    rewards: tuple[float, ...] = ()
    refusal: str = ""
    is_proof: bool = False

    @property
    def has_variance(self) -> bool:
        return max(self.rewards) - min(self.rewards) > 1e-9


class LearnedStep(NamedTuple):
    """The outcome of one step: counted tokens, loss in nats a token, whether there is a gradient, and the report.

    The loss is the mean surprise at the answers' own tokens, an estimate of the policy's entropy.
    """

    tokens: int
    loss: float
    has_gradient: bool
    report: RolloutsJudged
    learned: tuple[tuple[PeerId, int, int], ...]
    credits: Credits


class CheckedAnswer(NamedTuple):
    """Margins (T,), differences (T,) to the claimed log probabilities, and margins of draws in bf16, (T,) or (0,)."""

    margins: Tensor
    differences: Tensor
    reference: Tensor


class HonestMargins:
    """The margins of draws in bf16, in the newest rounds: devices of other classes are expected to differ as much."""

    def __init__(self) -> None:
        self._kept = deque[tuple[int, Tensor]]()

    def needs(self, round_number: int, max_age: int) -> bool:
        """Drop what is older than the groups of this round may be, and say whether more texts should be drawn."""
        while self._kept and self._kept[0][0] < round_number - max_age:
            self._kept.popleft()
        return sum(len(each) for _, each in self._kept) < REFERENCE_TOKENS

    def add(self, round_number: int, margins: Tensor) -> None:
        self._kept.append((round_number, margins))

    def test(self) -> SumTest:
        return SumTest.calibrate(torch.cat([torch.empty(0), *(each for _, each in self._kept)]), HONEST_TIMES)


@dataclass
class UntestedMargins:
    """The margins of one maker since its last full test, and how many tokens the next test needs."""

    kept: list[Tensor] = field(default_factory=list)
    needed: int = TESTED_TOKENS

    def accepts(self, margins: Tensor, test: SumTest) -> bool:
        """Add those of a group, and test all of them once they are enough."""
        self.kept.append(margins)
        joined = torch.cat(self.kept)
        if len(joined) < self.needed:
            return True
        is_honest = test.accepts(joined)
        self.needed *= 2
        if self.needed > MOST_TESTED_TOKENS or not is_honest:
            self.kept, self.needed = [], TESTED_TOKENS
        return is_honest


class RolloutLearner:
    """The groups that wait for one trainer, the policies that drew them, and the steps."""

    def __init__(self, manifest: Manifest, base: Path, model: LanguageModel, device: str) -> None:
        self._rl = require_rl(manifest)
        self._run_id = manifest.run_id
        self._model = model
        self._device = device
        self._encoder = QuestionEncoder(manifest, base)
        self._usable = self._encoder.usable.to(model.flat.device)
        self._require_room(manifest.model.context)
        self._limits = GroupLimits.of(manifest, MAX_STEPS)  # the daemon has checked their number
        self._policies = dict[int, Tensor]()  # weights by round
        self._waiting = deque[SignedGroup]()
        self._requested = 0
        self._honest = HonestMargins()
        self._margins = RecentTable[PeerId, UntestedMargins](256)  # of makers on other devices

    def _require_room(self, context: int) -> None:
        task = self._encoder.tasks[self._rl.task]
        questions = (task.question(self._run_id, number) for number in range(CHECKED_QUESTIONS))
        longest = max(len(self._encoder.prompt(each)) for each in questions)
        if longest + self._rl.answer_tokens > context:
            raise DataError(
                f"questions of {longest} tokens and answers of {self._rl.answer_tokens} do not fit into model.context "
                f"{context}; raise it, or lower rl.answer_tokens"
            )

    def keep_policy(self, round_number: int, weights: Tensor, *, is_other_chain: bool = False) -> None:
        """Keep a copy of the weights of a round, by which groups of that round are checked."""
        if is_other_chain:
            self._policies.clear()
        self._policies[round_number] = weights.detach().to("cpu", copy=True)
        for old in [each for each in self._policies if each < round_number - self._rl.max_age]:
            del self._policies[old]

    def receive(self, maker: PeerId, body: bytes) -> None:
        """Take a group that the daemon hands out."""
        group = RolloutGroup.from_wire(wire.RolloutGroup.FromString(body), self._limits)
        self._waiting.append(SignedGroup(maker, group))
        self._requested = max(0, self._requested - 1)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def request(self) -> int:
        """Return how many further groups to ask for now; they count as requested."""
        missing = max(0, AHEAD * self._rl.groups - len(self._waiting) - self._requested)
        self._requested += missing
        return missing

    def learn(
        self, round_number: int, microbatch: int, learned: Iterable[tuple[PeerId, int, int]], at: Tensor | None
    ) -> LearnedStep:
        """Check and score the next batch, and add the gradient of its loss to the model's.

        Args:
            learned: the place after the last group of each maker.
            at: take the gradient at these weights; the model keeps its own.
        """
        batch = [self._waiting.popleft() for _ in range(min(self._rl.groups, len(self._waiting)))]
        scored = self._check(batch, microbatch, round_number)
        valid = [each for each in scored if not each.refusal]
        useful = [each for each in valid if each.has_variance]
        with loaded_weights(self._model, at) if at is not None else nullcontext():
            metrics = self._add_gradient(useful, microbatch)
        surprise = [-value for each in valid for row in each.rows for value in row.claimed]
        verdicts = tuple(_verdict(each, round_number) for each in scored)
        report = RolloutsJudged(
            verdicts=verdicts,
            skipped=len(valid) - len(useful),
            entropy=sum(surprise) / max(1, len(surprise)),
            mismatch=metrics.mismatch_kl,
            effective=metrics.effective_samples,
            clipped=metrics.clipped,
            samples=tuple(self._sample(each) for each in valid[:1]),
        )
        oldest = round_number - self._rl.max_age
        places = {maker: (number, serial) for maker, number, serial in learned if number >= oldest}
        places |= {each.maker: (each.group.round, each.group.serial + 1) for each in batch}
        after = tuple((maker, *place) for maker, place in sorted(places.items()))
        credited = add_credits([RolloutCredit(each.maker, 1, each.group.tokens) for each in valid])
        return LearnedStep(len(surprise), report.entropy, bool(useful), report, after, credited)

    def _sample(self, scored: ScoredGroup) -> RolloutSample:
        answer = self._encoder.text(scored.rows[0].answer)
        return RolloutSample(
            maker=scored.maker,
            question=scored.question.prompt.strip()[:SAMPLE_CHARACTERS],
            answer=answer[:SAMPLE_CHARACTERS],
            reward=scored.rewards[0],
        )

    def _check(self, batch: Sequence[SignedGroup], microbatch: int, round_number: int) -> list[ScoredGroup]:
        """Refuse groups that were not drawn as the run prescribes, and score the others; in their order.

        So no maker chooses the text that a task of the run's own has to score.
        """
        scored = [self._open(each) for each in batch]
        for number, policy in self._policies.items():
            places = [place for place, each in enumerate(scored) if each.group.round == number]
            if not places:
                continue
            rows = [row for place in places for row in scored[place].rows]
            draws_again = not all(self._is_alike(scored[place]) for place in places) and self._honest.needs(
                round_number, self._rl.max_age
            )
            with torch.no_grad(), loaded_weights(self._model, policy):
                checked = list(self._examine(rows, microbatch, draws_again=draws_again))
            if draws_again:
                self._honest.add(round_number, torch.cat([each.reference for each in checked]))
            remaining = iter(checked)
            for place in places:
                scored[place] = self._judge(scored[place], [next(remaining) for _ in scored[place].rows])
        known = self._policies
        judged = [each if each.group.round in known else replace(each, refusal=WEIGHTS_GONE) for each in scored]
        return [each if each.refusal else self._score(each) for each in judged]

    def _score(self, valid: ScoredGroup) -> ScoredGroup:
        rewards = tuple(self._encoder.score(valid.question, row.answer) for row in valid.rows)
        return replace(valid, rewards=rewards)

    def _open(self, found: SignedGroup) -> ScoredGroup:
        maker, group = found.maker, found.group
        question = question_of(self._encoder.tasks[self._rl.task], self._run_id, maker, group.place)
        prompt = self._encoder.prompt(question)
        rows = tuple(
            ClaimedAnswer(prompt, answer.tokens, self._key(maker, group.place, sample), answer.log_probabilities)
            for sample, answer in enumerate(group.answers)
        )
        return ScoredGroup(maker, group, question, rows)

    def _key(self, maker: PeerId, place: Place, sample: int) -> int:
        return noise_key(*noise_parts(self._run_id, maker, place, sample))

    def _examine(self, rows: Sequence[ClaimedAnswer], microbatch: int, *, draws_again: bool) -> Iterator[CheckedAnswer]:
        """Yield for each answer what one pass shows, with a second one in bf16 if it `draws_again`."""
        for part in _parts(rows, microbatch):
            exact = self._logits(part)
            coarse = self._coarse_logits(part) if draws_again else [None] * len(part)
            for row, logits, rounded in zip(part, exact, coarse, strict=True):
                tokens = torch.tensor(row.answer, device=logits.device)
                found = self._log_probabilities(logits, tokens)
                yield CheckedAnswer(
                    self._margins_of(row, logits, tokens).cpu(),
                    (found.cpu() - torch.tensor(row.claimed)).abs(),
                    torch.empty(0) if rounded is None else self._reference(row, logits, rounded).cpu(),
                )

    def _coarse_logits(self, rows: Sequence[ClaimedAnswer]) -> list[Tensor]:
        with torch.autocast(self._model.flat.device.type, torch.bfloat16):
            return self._logits(rows)

    def _reference(self, row: ClaimedAnswer, logits: Tensor, rounded: Tensor) -> Tensor:
        """Compute the margins (T,) of the tokens that the answer's noise draws from rounded logits."""
        scores = scores_of_text(rounded, self._rl.temperature, row.key, self._usable)
        return self._margins_of(row, logits, self._usable[scores.argmax(dim=1)])

    def _margins_of(self, row: ClaimedAnswer, logits: Tensor, tokens: Tensor) -> Tensor:
        return margins_of(logits, self._rl.temperature, row.key, tokens, self._usable)

    def _logits(self, rows: Sequence[ClaimedAnswer]) -> list[Tensor]:
        """Compute logits (T, usable ids) before all tokens of each answer in one pass."""
        device = self._model.flat.device
        texts = [[*row.prompt, *row.answer[:-1]] for row in rows]
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)
        logits: Tensor = self._model(tokens)
        return [
            logits[place, len(row.prompt) - 1 : len(text)].float()[:, self._usable]
            for place, (row, text) in enumerate(zip(rows, texts, strict=True))
        ]

    def _log_probabilities(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute those of tokens (T,); one that cannot be drawn gets that of another, and an infinite margin."""
        places = torch.searchsorted(self._usable, tokens).clamp(max=len(self._usable) - 1)
        return torch.log_softmax(logits / self._rl.temperature, dim=-1).gather(1, places[:, None])[:, 0]

    def _is_alike(self, scored: ScoredGroup) -> bool:
        """Check whether this trainer's device computes the same bits as the maker's: the CPUs of one class do."""
        return scored.group.device == self._device and self._device.startswith("cpu ")

    def _judge(self, scored: ScoredGroup, checked: Sequence[CheckedAnswer]) -> ScoredGroup:
        margins = torch.cat([each.margins for each in checked])
        differences = torch.cat([each.differences for each in checked])
        if fault := self._find_early_end(scored):
            return replace(scored, refusal=fault, is_proof=True)
        if self._is_alike(scored):
            fault = judge_exactly(margins, differences)
            return replace(scored, refusal=fault, is_proof=bool(fault))
        return replace(scored, refusal=self._judge_by_sum(scored.maker, margins, differences))

    def _judge_by_sum(self, maker: PeerId, margins: Tensor, differences: Tensor) -> str:
        """Test the margins of a group, and those of its maker since the last test once they are enough."""
        test = self._honest.test()
        if fault := judge_elsewhere(margins, differences, test):
            return fault
        is_honest = self._margins.setdefault(maker, UntestedMargins()).accepts(margins, test)
        return "" if is_honest else OTHER_DRAWS

    def _find_early_end(self, scored: ScoredGroup) -> str:
        """Return the fault of an answer that neither ends with a stop nor has all its tokens, or goes on after one."""
        for row in scored.rows:
            stops = [place for place, token in enumerate(row.answer) if token in self._encoder.stops]
            full = len(row.answer) == self._rl.answer_tokens
            if (stops and stops[0] != len(row.answer) - 1) or (not stops and not full):
                return "an answer does not end where its stop is"
        return ""

    def _add_gradient(self, useful: Sequence[ScoredGroup], microbatch: int) -> PolicyMetrics:
        """Add the gradient of the loss over all tokens of groups to the model's."""
        rewards = torch.tensor([reward for each in useful for reward in each.rewards])
        numbers = [number for number, each in enumerate(useful) for _ in each.rewards]
        if not useful:
            return PolicyMetrics(0.0, 1.0, 0.0, 0)
        advantages = centre_rewards(rewards, numbers).values.tolist()
        rows = [row for each in useful for row in each.rows]
        total = sum(len(row.answer) for row in rows)
        self._model.attach_gradient()
        pairs = list(zip(rows, advantages, strict=True))
        return _mean([self._add_part(part, total) for part in _parts(pairs, microbatch)])

    def _add_part(self, part: Sequence[tuple[ClaimedAnswer, float]], total: int) -> PolicyMetrics:
        """Add the gradient of some answers, whose loss is divided by all tokens of the batch."""
        device = self._model.flat.device
        with autocast_context(device):
            logits = self._logits([row for row, _ in part])
        found = torch.cat(
            [
                self._log_probabilities(each, torch.tensor(row.answer, device=device))
                for each, (row, _) in zip(logits, part, strict=True)
            ]
        )
        behaviour = torch.tensor([value for row, _ in part for value in row.claimed], device=device)
        advantages = torch.tensor([value for row, value in part for _ in row.answer], device=device)
        loss, metrics = POLICY_LOSSES[self._rl.loss](found, behaviour, advantages)
        if self._rl.entropy:
            loss = loss - self._rl.entropy * mean_entropy(torch.cat(logits), self._rl.temperature)
        torch.autograd.backward(loss * (len(behaviour) / total))
        return metrics


def _parts(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[first : first + size] for first in range(0, len(values), size))


def judge_exactly(margins: Tensor, differences: Tensor) -> str:
    """Return why a device of the same class cannot have drawn tokens with these margins; empty if it can."""
    if not is_exact(margins):
        return OTHER_TOKEN
    return OTHER_VALUES if float(differences.max()) > EXACT_DIFFERENCE else ""


def judge_elsewhere(margins: Tensor, differences: Tensor, test: SumTest) -> str:
    """Return why no device can have drawn tokens with these margins; empty if one can."""
    if not test.accepts(margins):
        return OTHER_DRAWS
    is_far = float(differences.max()) > LARGEST_DIFFERENCE or float(differences.mean()) > MEAN_DIFFERENCE
    return OTHER_VALUES if is_far else ""


def _verdict(scored: ScoredGroup, round_number: int) -> GroupVerdict:
    group = scored.group
    return GroupVerdict(
        maker=scored.maker,
        round=group.round,
        serial=group.serial,
        age=max(0, round_number - group.round),
        refusal=scored.refusal,
        is_proof=scored.is_proof,
        is_unchecked=scored.refusal == WEIGHTS_GONE,
        reward=sum(scored.rewards) / max(1, len(scored.rewards)),
        tokens=group.tokens,
        answers=len(group.answers),
    )


def _mean(found: Sequence[PolicyMetrics]) -> PolicyMetrics:
    """Average metrics by their tokens."""
    total = sum(each.tokens for each in found)

    def mean(values: Iterable[float]) -> float:
        return sum(value * each.tokens for value, each in zip(values, found, strict=True)) / total

    return PolicyMetrics(
        mean(each.mismatch_kl for each in found),
        mean(each.effective_samples for each in found),
        mean(each.clipped for each in found),
        total,
    )

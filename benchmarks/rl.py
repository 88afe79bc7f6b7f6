"""Reinforcement learning by processes behind slow links, or in one process; and cheats by their kind.

    python -m benchmarks.rl [--tasks reverse brackets] [--seeds 3] [--minutes 20] [--recipe frugal] [--json]
    python -m benchmarks.rl --local [--tasks reverse] [--seeds 3] [--updates 1000] [--loss dppo] [--json]
    python -m benchmarks.rl --ages 4 16 [--tasks brackets] [--seeds 3] [--updates 60] [--json]

The first form is `benchmarks.rl_swarm`: one trainer and three rollout peers, some of which die. It needs root,
iproute2, nftables and iptables, and a core for each peer; on fewer cores, more minutes.

`--local`: a small decoder of bytes learns a task from right answers until the likeliest ones are right, then from
answers with errors until those that it draws are mediocre, and then from the scores of its own answers: groups of draws
with public noise, rewards centred in each group, and a loss with a trust region. The control goes on without updates.
Rewards are those of questions that are asked in no update, at temperature 1.

`--ages`: the same, where the policy that draws is some updates older than the one that learns, by each loss and by one
without a trust region, which no run may have; and one or two trainers that share the groups of rounds of nine steps.
All learn from equally many answers.

The last table judges claimed rollouts of the model after the warm-up: `exact` and `sum` are the shares of parts of
some 300 tokens that the rules for devices of one kind and for others refuse, and `grown` is the share of peers of whom
a test fails in 400 answers, as the second rule joins the parts. Honest bf16 draws of two more peers calibrate it.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.demonstrations import answers_with_errors, right_answers
from benchmarks.rl_swarm import SwarmResult, measure_processes, rate_of_right_answers
from node.model import LanguageModel, build_model, initial_weights
from node.model.generate import Completion, Sampling, complete
from node.trainer.reinforcement import HONEST_TIMES, REFERENCE_TOKENS, UntestedMargins
from optim.rollouts import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyMetrics,
    SumTest,
    centre_rewards,
    is_exact,
    margins_of,
    mean_entropy,
    noise_key,
)
from protocol.manifest.model import ModelSection
from protocol.scored_tasks import TASKS, Question
from tests.netlab.lab.namespaces import reason_unavailable

MODEL = ModelSection(vocabulary=128, width=48, layers=2, heads=4, hidden=128, context=48)
USABLE = torch.arange(MODEL.vocabulary)
END = ord("\n")
ANSWER_TOKENS = 12
GROUP, GROUPS = 8, 16
ENTROPY = 0.0
RATE = 1e-3
LIKELIEST, MEDIOCRE = 0.9, 0.35  # mean rewards at which the two parts of the warm-up end, at temperature 0 and 1
ERRING = 0.3  # mean score of the answers that the second part learns
MOST_STEPS = 3000  # of a part
ROUND_STEPS = 9
PART, PARTS = 50, 8  # answers of a peer that are tested at once, and how often
HONEST_MORE = 8  # times as many peers, to count refusals that should be rare
CALIBRATING = 100_000  # number of the first peer that calibrates
GOAL = 0.85  # of the mean of `NEWEST` updates; a little more than is promised for held-out questions
NEWEST = 25
FIRST_SCORED, HELD_OUT = 500_000, 1_000_000  # numbers of the first questions
HONEST_AND_CHEATS = (
    "honest", "honest, 2 threads", "honest, bf16", "greedy", "temperature 0.7", "older policy", "int8 weights",
    "4-bit weights", "edited token", "copied rollout", "wrong prompt",
)  # fmt: skip


@dataclass(frozen=True)
class Rollout:
    """A prompt, its answer with the key of its noise, and the score."""

    question: Question
    prompt: list[int]
    key: int
    answer: list[int]
    behaviour: list[float]
    reward: float


@dataclass
class Result:
    """The mean rewards of one seed, CPU-seconds, and the metrics of its last update; `curve`: means of 25 updates."""

    task: str
    seed: int
    before: float
    after: float
    control: float
    seconds: float
    updates: int
    skipped_groups: int
    metrics: dict[str, float]
    curve: list[float]


def encode(text: str) -> list[int]:
    return list(text.encode())


def roll_out(
    model: LanguageModel, questions: Sequence[Question], keys: Sequence[int], temperature: float = 1.0
) -> list[Rollout]:
    """Answer each question once, by the noise of its key."""
    prompts = [encode(question.prompt) for question in questions]
    drawn = complete(
        model, prompts, ANSWER_TOKENS, Sampling(temperature), USABLE, frozenset({END}), list(keys), keeps_stops=True
    )
    return [
        _judge(question, prompt, key, completion)
        for question, prompt, key, completion in zip(questions, prompts, keys, drawn, strict=True)
    ]


def _judge(question: Question, prompt: list[int], key: int, drawn: Completion) -> Rollout:
    text = bytes(drawn.tokens).decode(errors="replace")
    reward = TASKS[question.task].score(question, text) if text.endswith("\n") else 0.0
    return Rollout(question, prompt, key, drawn.tokens, drawn.log_probabilities, reward)


def answer_logits(model: LanguageModel, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Compute logits (S, V) before all tokens of all answers in one pass, and these tokens (S,)."""
    rows = [rollout.prompt + rollout.answer for rollout in rollouts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    for place, rollout in enumerate(rollouts):
        counted[place, len(rollout.prompt) : len(rows[place])] = True
    logits: Tensor = model(tokens[:, :-1])
    return logits[counted[:, 1:]].float(), tokens[counted]


def warm_up(model: LanguageModel, task: str, run: str) -> LanguageModel:
    """Learn right answers until the likeliest ones are right, then answers with errors; returns an earlier policy."""
    held = held_out_prompts(task, run)
    right, erring = (
        (each for each in answers if each[0].prompt not in held)
        for answers in (right_answers(task, run), answers_with_errors(task, run, ERRING))
    )
    imitate(
        model,
        right,
        rate_of_right_answers(task),
        lambda: mean_reward(model, task, run, 128, temperature=0.0) >= LIKELIEST,
    )
    return imitate(model, erring, 5e-4, lambda: mean_reward(model, task, run, 128) <= MEDIOCRE)


def imitate(
    model: LanguageModel, answers: Iterator[tuple[Question, str]], rate: float, has_learned: Callable[[], bool]
) -> LanguageModel:
    """Learn answers until this holds; returns the policy before the last steps. AssertionError if it never holds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    older = model
    for step in range(MOST_STEPS):
        if step % 20 == 0:
            if has_learned():
                return older
            older = copy_of(model)
        given = [
            Rollout(question, encode(question.prompt), 0, encode(answer + "\n"), [], 1.0)
            for question, answer in itertools.islice(answers, 64)
        ]
        logits, tokens = answer_logits(model, given)
        _step(optimizer, torch.nn.functional.cross_entropy(logits, tokens))
    raise AssertionError(f"the warm-up has not come to its end in {MOST_STEPS} steps")


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    optimizer.step()


def mean_reward(
    model: LanguageModel, task: str, run: str, count: int = 256, temperature: float = 1.0, noise: str = ""
) -> float:
    questions = list(itertools.islice(held_out(task, run), count))
    keys = [noise_key(run, "held out", noise, number) for number in range(count)]
    rollouts = roll_out(model, questions, keys, temperature)
    return sum(rollout.reward for rollout in rollouts) / count


@functools.cache
def held_out_prompts(task: str, run: str) -> frozenset[str]:
    """Return the prompts that no update from scores asks."""
    return frozenset(question.prompt for question in itertools.islice(held_out(task, run), 256))


def held_out(task: str, run: str) -> Iterator[Question]:
    return (TASKS[task].question(run, number) for number in itertools.count(HELD_OUT))


def asked(task: str, run: str) -> Iterator[Question]:
    """Yield the questions of updates from scores."""
    kept = held_out_prompts(task, run)
    return (
        question
        for number in itertools.count(FIRST_SCORED)
        if (question := TASKS[task].question(run, number)).prompt not in kept
    )


@dataclass
class Learned:
    """Groups without variance, the updates, the metrics of the last one, and the mean reward of each."""

    skipped: int = 0
    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    def curve(self) -> Iterator[float]:
        """Yield the means of `NEWEST` updates at a time."""
        for first in range(0, len(self.rewards), NEWEST):
            part = self.rewards[first : first + NEWEST]
            yield sum(part) / len(part)

    def has_reached(self, goal: float) -> bool:
        return len(self.rewards) >= NEWEST and sum(self.rewards[-NEWEST:]) / NEWEST >= goal


@dataclass(frozen=True)
class Learning:
    """How to learn from scores.

    Attributes:
        goal: mean reward of the newest updates at which it ends.
        age: rounds between the policy that draws an answer and the one that learns from it.
        trainers: that share the groups, and take the mean of their weights after each round.
        steps: updates of a round, in which one policy draws.
    """

    updates: int = 1000
    loss: str = "dppo"
    entropy: float = ENTROPY
    goal: float = GOAL
    age: int = 0
    trainers: int = 1
    steps: int = 1


def reinforce(model: LanguageModel, task: str, run: str, way: Learning) -> Learned:
    """Learn from groups of scored rollouts, up to the goal."""
    models = [model, *(copy_of(model) for _ in range(way.trainers - 1))]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.99)) for each in models]
    questions, learned, policies = asked(task, run), Learned(), deque[LanguageModel](maxlen=way.age + 1)
    while learned.updates < way.updates and not learned.has_reached(way.goal):
        if learned.updates % way.steps == 0:
            take_mean(models)
            policies.append(copy_of(model))
        chosen = [question for question in itertools.islice(questions, GROUPS) for _ in range(GROUP)]
        groups = [number // GROUP for number in range(len(chosen))]
        keys = [noise_key(run, learned.updates, number) for number in range(len(chosen))]
        drawn = roll_out(policies[0], chosen, keys)
        rewards = torch.tensor([each.reward for each in drawn])
        advantages = centre_rewards(rewards, groups)
        learned.skipped += advantages.skipped_groups
        learned.rewards.append(float(rewards.mean()))
        learned.updates += 1
        for place, (trained, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = [group % way.trainers == place for group in groups]
            kept = [number for number, value in enumerate(advantages.values.tolist()) if value != 0.0 and mine[number]]
            if kept:
                own = [drawn[number] for number in kept]
                learned.metrics = _learn(trained, optimizer, own, advantages.values[kept], way)
    take_mean(models)
    return learned


@torch.no_grad()
def take_mean(models: Sequence[LanguageModel]) -> None:
    """Give all models the mean of their weights."""
    if len(models) > 1:
        mean = torch.stack([each.flat for each in models]).mean(dim=0)
        for each in models:
            each.load_flat(mean)


def _learn(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    way: Learning,
) -> dict[str, float]:
    logits, tokens = answer_logits(model, rollouts)
    found = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    behaviour = torch.tensor([value for rollout in rollouts for value in rollout.behaviour])
    lengths = torch.tensor([len(rollout.answer) for rollout in rollouts])
    loss, metrics = LOSSES[way.loss](found, behaviour, advantages.repeat_interleave(lengths))
    _step(optimizer, loss - way.entropy * mean_entropy(logits, 1.0))
    return asdict(metrics)


def unclipped(log_probabilities: Tensor, behaviour: Tensor, advantages: Tensor) -> tuple[Tensor, PolicyMetrics]:
    """Compute the loss of `dppo` without its trust region, which no run may have; see there."""
    _, metrics = POLICY_LOSSES["dppo"](log_probabilities.detach(), behaviour, advantages)
    return -(advantages * (log_probabilities - behaviour).exp()).mean(), metrics


LOSSES: dict[str, PolicyLoss] = {**POLICY_LOSSES, "unclipped": unclipped}


@dataclass(frozen=True)
class Arm:
    """A way to learn, and what it came to after the same number of answers as all others."""

    task: str
    seed: int
    loss: str
    age: int
    trainers: int
    steps: int
    before: float
    after: float
    mismatch_kl: float
    effective_samples: float
    clipped: float
    curve: list[float]


def ways_to_compare(options: argparse.Namespace) -> Iterator[Learning]:
    """Yield fresh answers, old ones by each loss, and rounds of one and of two trainers."""
    fresh = Learning(options.updates, options.loss, options.entropy, math.inf)
    yield fresh
    for age, loss in itertools.product(options.ages, LOSSES):
        yield replace(fresh, age=age, loss=loss)
    for trainers in (1, 2):
        yield replace(fresh, trainers=trainers, steps=ROUND_STEPS)


def compare_ways(task: str, seed: int, ways: Iterable[Learning]) -> Iterator[Arm]:
    """Learn in several ways after the same warm-up."""
    run, warm = f"benchmark {seed}", build_model(MODEL)
    warm.load_flat(initial_weights(MODEL, seed))
    warm_up(warm, task, run)
    before = mean_reward(warm, task, run)
    for way in ways:
        model = copy_of(warm)
        learned = reinforce(model, task, run, way)
        after, metrics = mean_reward(model, task, run), learned.metrics
        yield Arm(
            task, seed, way.loss, way.age, way.trainers, way.steps, before, after, metrics["mismatch_kl"],
            metrics["effective_samples"], metrics["clipped"], list(learned.curve()),
        )  # fmt: skip


def measure(task: str, seed: int, way: Learning) -> tuple[Result, LanguageModel, LanguageModel]:
    """Measure one seed; returns also the model after the warm-up and one before it."""
    run, start = f"benchmark {seed}", time.process_time()
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, seed))
    older = warm_up(model, task, run)
    warm, before = copy_of(model), mean_reward(model, task, run)
    learned = reinforce(model, task, run, way)
    after, control = mean_reward(model, task, run), mean_reward(warm, task, run, noise="again")
    seconds = time.process_time() - start
    result = Result(
        task, seed, before, after, control, seconds, learned.updates, learned.skipped, learned.metrics,
        list(learned.curve()),
    )  # fmt: skip
    return result, warm, older


def claims(
    kind: str, model: LanguageModel, older: LanguageModel, questions: Sequence[Question], keys: Sequence[int]
) -> list[Rollout]:
    """Return what a peer of a kind claims to have drawn at temperature 1, by the noise of these keys."""
    if kind == "greedy":
        return roll_out(model, questions, keys, 0.0)
    if kind == "temperature 0.7":
        return roll_out(model, questions, keys, 0.7)
    if kind == "older policy":
        return roll_out(older, questions, keys)
    if kind == "int8 weights":
        return roll_out(rounded(model, 8), questions, keys)
    if kind == "4-bit weights":
        return roll_out(rounded(model, 4), questions, keys)
    if kind == "honest, bf16":
        with torch.autocast("cpu", torch.bfloat16):
            return roll_out(model, questions, keys)
    if kind == "honest, 2 threads":
        torch.set_num_threads(2)
        drawn = roll_out(model, questions, keys)
        torch.set_num_threads(1)
        return drawn
    drawn = roll_out(model, questions, keys)
    return list(forge(kind, model, drawn))


def forge(kind: str, model: LanguageModel, drawn: Sequence[Rollout]) -> Iterator[Rollout]:
    """Change honest rollouts: one in ten has one token edited, or all are those of another key or prompt."""
    for number, rollout in enumerate(drawn):
        other = drawn[number - 1]
        if kind == "edited token" and number % 10 == 0:
            place = number // 10 % len(rollout.answer)
            edited = [*rollout.answer]
            edited[place] = ord("a") + (edited[place] + 1 - ord("a")) % 26
            yield Rollout(rollout.question, rollout.prompt, rollout.key, edited, [], 0.0)
        elif kind == "copied rollout":
            yield Rollout(other.question, other.prompt, rollout.key, other.answer, [], 0.0)
        elif kind == "wrong prompt":
            yield Rollout(rollout.question, other.prompt, rollout.key, rollout.answer, [], 0.0)
        else:
            yield rollout


def copy_of(model: LanguageModel) -> LanguageModel:
    """Build a model with the same weights, whose parameters are parts of its vector."""
    other = build_model(MODEL)
    other.load_flat(model.flat.detach().clone())
    return other


def rounded(model: LanguageModel, bits: int) -> LanguageModel:
    """Round each matrix to so many bits, with one scale for each row."""
    largest = 2 ** (bits - 1) - 1
    coarse = copy_of(model)
    with torch.no_grad():
        for parameter in coarse.parameters():
            if parameter.dim() == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
                parameter.copy_((parameter / scale).round() * scale)
    return coarse


def judge_kinds(task: str, model: LanguageModel, older: LanguageModel, peers: int) -> dict[str, dict[str, float]]:
    """Judge every kind by the rules of `node.trainer.reinforcement`: parts of some 300 tokens, and whole peers."""
    honest = itertools.islice(parts_by_peer("honest, bf16", task, model, older, itertools.count(CALIBRATING)), 2)
    test = SumTest.calibrate(torch.cat([*itertools.chain.from_iterable(honest)])[:REFERENCE_TOKENS], HONEST_TIMES)
    found = dict[str, dict[str, float]]()
    for kind in HONEST_AND_CHEATS:
        number = peers * (HONEST_MORE if kind in ("honest", "honest, bf16") else 1)
        by_peer = list(parts_by_peer(kind, task, model, older, range(number)))
        parts = list(itertools.chain.from_iterable(by_peer))
        found[kind] = {
            "tokens": sum(map(len, parts)) / len(parts),
            "mean_margin": float(torch.cat(parts).clamp(max=1).mean()),
            "exact": sum(not is_exact(each) for each in parts) / len(parts),
            "sum": sum(not test.accepts(each) for each in parts) / len(parts),
            "grown": sum(is_refused(own, test) for own in by_peer) / number,
        }
    return found


def is_refused(parts: Iterable[Tensor], test: SumTest) -> bool:
    """Check the margins of one maker as they come in, as a trainer does."""
    untested = UntestedMargins()
    return not all(untested.accepts(each, test) for each in parts)


@torch.no_grad()
def parts_by_peer(
    kind: str, task: str, model: LanguageModel, older: LanguageModel, peers: Iterable[int]
) -> Iterator[list[Tensor]]:
    """Yield the margins of what each peer claims, in parts of `PART` answers."""
    for peer in peers:
        numbers = range(peer * PART * PARTS, (peer + 1) * PART * PARTS)
        questions = [TASKS[task].question("arms", number) for number in numbers]
        rollouts = claims(kind, model, older, questions, [noise_key("arms", number) for number in numbers])
        logits, tokens = answer_logits(model, rollouts)
        lengths = [len(each.answer) for each in rollouts]
        answers = zip(torch.split(logits, lengths), torch.split(tokens, lengths), rollouts, strict=True)
        margins = [margins_of(part, 1.0, each.key, claimed, USABLE) for part, claimed, each in answers]
        yield [torch.cat(margins[first : first + PART]) for first in range(0, len(margins), PART)]


def measure_local(options: argparse.Namespace) -> tuple[list[Result], dict[str, Any]]:
    """Measure all tasks and seeds in this process, and the claims after the first warm-up."""
    results, kinds = list[Result](), dict[str, Any]()
    for task, seed in itertools.product(options.tasks, range(options.seeds)):
        result, warm, older = measure(task, seed, Learning(options.updates, options.loss, options.entropy))
        results.append(result)
        note(result)
        if seed == 0:
            kinds[task] = judge_kinds(task, warm, older, options.peers)
    return results, kinds


def measure_swarms(options: argparse.Namespace) -> tuple[list[SwarmResult], dict[str, Any]]:
    """Measure all tasks and seeds by processes, and then the claims."""
    results = list[SwarmResult]()
    for task, seed in itertools.product(options.tasks, range(options.seeds)):
        results.append(measure_processes(task, seed, options.minutes, options.recipe))
        note(results[-1])
    kinds = dict[str, Any]()
    for task in options.tasks:
        _, warm, older = measure(task, 0, Learning(updates=0))
        kinds[task] = judge_kinds(task, warm, older, options.peers)
    return results, kinds


def print_ways(options: argparse.Namespace) -> None:
    """Measure ways to learn, and print a line for each arm while the next one is measured."""
    found = list[Arm]()
    for task, seed in itertools.product(options.tasks, range(options.seeds)):
        for arm in compare_ways(task, seed, ways_to_compare(options)):
            found.append(arm)
            way = f"age {arm.age}, {arm.loss}, {arm.trainers} of {arm.steps} steps"
            line = f"{arm.task}, seed {arm.seed}, {way}: reward {arm.before:.3f} -> {arm.after:.3f}"
            print(f"{line}, mismatch {arm.mismatch_kl:.4f}, clipped {arm.clipped:.3f}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(arm) for arm in found], indent=2))


def note(result: Result | SwarmResult) -> None:
    """Print a result while the next one is measured."""
    rewards = f"{result.before:.3f} -> {result.after:.3f}, control {result.control:.3f}"
    print(f"{result.task}, seed {result.seed}: reward {rewards}; {describe(result)}", file=sys.stderr, flush=True)


def describe(result: Result | SwarmResult) -> str:
    if isinstance(result, Result):
        of = f"{result.skipped_groups} of {result.updates * GROUPS} groups without variance"
        return f"{result.seconds:.0f} CPU-seconds, {result.updates} updates, {of}"
    received = max(result.bytes_received) / 1e6
    return (
        f"{result.minutes:.1f} minutes, {result.rounds} rounds, {received:.1f} MB to a rollout peer at most, "
        f"weights {result.share_of_bf16:.1%} of bf16 a round, {result.refused} of {result.taken + result.refused} "
        f"honest groups refused, killed: {', '.join(result.deaths) or 'nobody'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["reverse", "brackets"], choices=tuple(TASKS))
    parser.add_argument("--minutes", type=float, default=20.0, help="of learning from scores at most")
    parser.add_argument("--recipe", default="frugal")
    parser.add_argument("--local", action="store_true", help="in this process, with --updates, --loss and --entropy")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--loss", default="dppo", choices=POLICY_LOSSES)
    parser.add_argument("--entropy", type=float, default=ENTROPY)
    parser.add_argument("--ages", type=int, nargs="+", default=(), help="in updates, of answers; with --updates alone")
    parser.add_argument("--peers", type=int, default=40, help="of each kind of cheat; more are honest")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.local or options.ages) and (reason := reason_unavailable()) is not None:
        parser.error(f"{reason}; --local needs no networks")
    torch.set_num_threads(1)
    if options.ages:
        print_ways(options)
        return
    results, kinds = measure_local(options) if options.local else measure_swarms(options)
    if options.json:
        print(json.dumps({"runs": [asdict(result) for result in results], "kinds": kinds}, indent=2))
        return
    for task, found in kinds.items():
        print(f"{task:20} {'tokens':>7} {'margin':>9} {'exact':>7} {'sum':>7} {'grown':>7}")
        for kind, row in found.items():
            shares = " ".join(f"{row[rule]:7.1%}" for rule in ("exact", "sum", "grown"))
            print(f"{kind:20} {row['tokens']:7.0f} {row['mean_margin']:9.5f} {shares}")


if __name__ == "__main__":
    main()

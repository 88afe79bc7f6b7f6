"""Reinforcement learning in one process: a warm-up on answers, then RL on scored rollouts; and cheats by their kind.

    python -m benchmarks.rl [--seeds 3] [--task reverse] [--updates 60] [--loss dppo] [--json]

A small decoder of bytes learns a task from right answers until it is mediocre, and then from the scores of its own
answers: groups of draws with public noise, rewards centred in each group, and a loss with a trust region. The control
goes on without updates. Rewards are those of held-out questions, at temperature 1.

The last table judges claimed rollouts of the model after the warm-up, about 300 tokens of one peer at a time: `exact`
is the rule for devices of one kind, `sum` that for others, calibrated on half of the honest bf16 claims.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from node.model import LanguageModel, build_model, initial_weights
from node.model.generate import Completion, Sampling, complete
from optim.rollouts import POLICY_LOSSES, SumTest, centre_rewards, is_exact, margins_of, noise_key
from protocol.manifest.model import ModelSection
from protocol.scored_tasks import TASKS, Question

MODEL = ModelSection(vocabulary=128, width=64, layers=2, heads=4, hidden=176, context=48)
USABLE = torch.arange(MODEL.vocabulary)
END = ord("\n")
ANSWER_TOKENS = 12
GROUP = 8
HELD_OUT = 1_000_000  # numbers of questions that nobody trains on
HONEST_AND_CHEATS = (
    "honest", "honest, 2 threads", "honest, bf16", "greedy", "temperature 0.7", "older policy", "int8 weights",
    "edited token", "copied rollout", "wrong prompt",
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
    """The mean rewards of one seed, and the metrics of its last update."""

    seed: int
    before: float
    after: float
    control: float
    seconds: float
    skipped_groups: int
    metrics: dict[str, float]


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


def warm_up(model: LanguageModel, task: str, run: str, reward: float, steps: int = 3000) -> LanguageModel:
    """Learn from right answers until the mean reward is at least this; returns an earlier policy."""
    optimizer, older = torch.optim.AdamW(model.parameters(), lr=2e-3), copy.deepcopy(model)
    for step in range(steps):
        if step % 50 == 0:
            if mean_reward(model, task, run, 64) >= reward:
                return older
            older = copy.deepcopy(model)
        questions = [TASKS[task].question(run, step * 64 + number) for number in range(64)]
        right = [Rollout(each, encode(each.prompt), 0, encode(solution(each) + "\n"), [], 1.0) for each in questions]
        logits, tokens = answer_logits(model, right)
        _step(optimizer, torch.nn.functional.cross_entropy(logits, tokens))
    return older


def solution(question: Question) -> str:
    return (" " if question.task == "sort" else "").join(question.solution)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    optimizer.step()


def mean_reward(model: LanguageModel, task: str, run: str, count: int = 256) -> float:
    questions = [TASKS[task].question(run, HELD_OUT + number) for number in range(count)]
    rollouts = roll_out(model, questions, [noise_key(run, "held out", number) for number in range(count)])
    return sum(rollout.reward for rollout in rollouts) / count


def reinforce(model: LanguageModel, task: str, run: str, updates: int, loss_name: str) -> tuple[int, dict[str, float]]:
    """Learn from groups of scored rollouts; returns the groups without variance, and the last metrics.

    The rollouts of a batch make two steps, so that the second one is off-policy.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    skipped, metrics = 0, dict[str, float]()
    for update in range(updates):
        rollouts, groups = list[Question](), list[int]()
        for group in range(24):
            question = TASKS[task].question(run, 500_000 + update * 24 + group)
            rollouts += [question] * GROUP
            groups += [group] * GROUP
        keys = [noise_key(run, update, group, number % GROUP) for number, group in enumerate(groups)]
        drawn = roll_out(model, rollouts, keys)
        advantages = centre_rewards(torch.tensor([each.reward for each in drawn]), groups)
        skipped += advantages.skipped_groups
        kept = [number for number, value in enumerate(advantages.values.tolist()) if value != 0.0]
        if not kept:
            continue
        for half in (kept[::2], kept[1::2]):
            metrics = _learn(model, optimizer, [drawn[number] for number in half], advantages.values[half], loss_name)
    return skipped, metrics


def _learn(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    loss_name: str,
) -> dict[str, float]:
    logits, tokens = answer_logits(model, rollouts)
    found = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    behaviour = torch.tensor([value for rollout in rollouts for value in rollout.behaviour])
    lengths = torch.tensor([len(rollout.answer) for rollout in rollouts])
    loss, metrics = POLICY_LOSSES[loss_name](found, behaviour, advantages.repeat_interleave(lengths))
    _step(optimizer, loss)
    return asdict(metrics)


def measure(task: str, seed: int, updates: int, loss_name: str) -> tuple[Result, LanguageModel, LanguageModel]:
    """Measure one seed; returns also the model after the warm-up and one before it."""
    run, start = f"benchmark {seed}", time.monotonic()
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, seed))
    older = warm_up(model, task, run, 0.3)
    warm, before = copy.deepcopy(model), mean_reward(model, task, run)
    skipped, metrics = reinforce(model, task, run, updates, loss_name)
    after, control = mean_reward(model, task, run), mean_reward(warm, task, f"{run} again")
    return Result(seed, before, after, control, time.monotonic() - start, skipped, metrics), warm, older


def claims(kind: str, model: LanguageModel, older: LanguageModel, questions: Sequence[Question]) -> list[Rollout]:
    """Return what a peer of a kind claims to have drawn at temperature 1."""
    keys = [noise_key("arms", number) for number in range(len(questions))]
    if kind == "greedy":
        return roll_out(model, questions, keys, 0.0)
    if kind == "temperature 0.7":
        return roll_out(model, questions, keys, 0.7)
    if kind == "older policy":
        return roll_out(older, questions, keys)
    if kind == "int8 weights":
        return roll_out(rounded(model), questions, keys)
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


def rounded(model: LanguageModel) -> LanguageModel:
    """Round each matrix to 8 bits, with one scale for each row."""
    coarse = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in coarse.parameters():
            if parameter.dim() == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
                parameter.copy_((parameter / scale).round() * scale)
    return coarse


def judge_kinds(task: str, model: LanguageModel, older: LanguageModel, peers: int) -> dict[str, dict[str, float]]:
    """Judge every kind: the share of peers that each rule refuses, with about 300 tokens of each."""
    questions = [TASKS[task].question("arms", number) for number in range(50 * peers)]
    margins = {kind: margins_by_peer(model, claims(kind, model, older, questions), peers) for kind in HONEST_AND_CHEATS}
    half = margins["honest, bf16"]
    test = SumTest.calibrate(torch.cat(half[: peers // 2]))
    return {
        kind: {
            "tokens": sum(map(len, found)) / peers,
            "mean_margin": float(torch.cat(found).clamp(max=1).mean()),
            "exact": sum(not is_exact(each) for each in found) / peers,
            "sum": sum(not test.accepts(each) for each in found[peers // 2 :]) / (peers - peers // 2),
        }
        for kind, found in margins.items()
    }


@torch.no_grad()
def margins_by_peer(model: LanguageModel, rollouts: Sequence[Rollout], peers: int) -> list[Tensor]:
    size, found = len(rollouts) // peers, list[Tensor]()
    for peer in range(peers):
        own = rollouts[peer * size : (peer + 1) * size]
        logits, tokens = answer_logits(model, own)
        lengths = [len(each.answer) for each in own]
        parts = zip(torch.split(logits, lengths), torch.split(tokens, lengths), own, strict=True)
        found.append(torch.cat([margins_of(part, 1.0, each.key, claimed, USABLE) for part, claimed, each in parts]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", default="reverse", choices=("reverse", "sort", "arithmetic"))
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--loss", default="dppo", choices=POLICY_LOSSES)
    parser.add_argument("--peers", type=int, default=40, help="claims of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, kinds = list[Result](), dict[str, Any]()
    for seed in range(options.seeds):
        result, warm, older = measure(options.task, seed, options.updates, options.loss)
        results.append(result)
        if not options.json:
            print(f"seed {seed}: reward {result.before:.3f} -> {result.after:.3f}, control {result.control:.3f}")
            print(f"    {result.seconds:.0f} s, {result.skipped_groups} groups skipped, {result.metrics}", flush=True)
        if seed == 0:
            kinds = judge_kinds(options.task, warm, older, options.peers)
    if options.json:
        print(json.dumps({"seeds": [asdict(result) for result in results], "kinds": kinds}, indent=2))
        return
    print(f"{'kind':20} {'tokens':>7} {'margin':>8} {'exact':>7} {'sum':>7}")
    for kind, found in kinds.items():
        print(f"{kind:20} {found['tokens']:7.0f} {found['mean_margin']:8.4f} {found['exact']:7.1%} {found['sum']:7.1%}")


if __name__ == "__main__":
    main()

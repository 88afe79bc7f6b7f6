"""Reinforcement learning by real processes: a trainer and three rollout peers, each behind a link of 20 Mbit/s.

Right answers come first, and then scores, in one manifest. Once scores have been learned for a while a rollout peer is
killed, comes back after some seconds, and then the trainer is killed and comes back at once. Rewards are those of
held-out questions at temperature 1, with the weights before the first update from scores and at the end; the control
has the first weights still. The interfaces of the kernel count the bytes.
"""

import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.demonstrations import answers_with_errors
from node.commands.up.peer_process import PeerProcess
from node.data.questions import DOCUMENTS, RIGHT_ANSWERS, QuestionEncoder
from node.model import build_model
from node.model.generate import Sampling, complete
from node.monitoring.status import LearningStatus, NodeStatus
from node.rollout.__main__ import read_anchor
from optim.rollouts import noise_key
from protocol.errors import MissingFileError
from protocol.manifest.run import Manifest
from protocol.rollout_groups import GroupLimits, Place, question_of, require_rl
from protocol.scored_tasks import TASKS, Question
from tests.netlab.lab.lab_swarm import LabSwarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.swarm.process_swarm import ENDLESS, isolated_processes, manifest_with

LINK = Link(up=20, down=20, delay=0.02)
ROLLOUT_PEERS = 3
WARM_UP_STEPS = 60  # of a round
EASY_TASKS = frozenset({"brackets"})  # learned in a third of the rounds, at twice the rate
ERRING_ROUNDS = 2
ERRING_SCORE = 0.4
SCORES_RATE = 1e-3
INNER_STEPS = 9
BATCH_TOKENS = 2048
ERRING = "erring.jsonl"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}\n{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
)  # a question is one line, and its answer another
GOAL = 0.8
SURE = 0.05  # above the goal in the newest rounds, so that the held-out questions reach it too
NEWEST = 3  # rounds
FAULT_ROUNDS = 5  # of learning from scores before the first death, and between the deaths
AWAY_SECONDS = 10.0  # of a rollout peer
START_SECONDS = 900.0
POLL_SECONDS = 1.0
QUESTIONS = 256
BF16_BYTES = 2


@dataclass
class SwarmResult:
    """What one run of processes came to.

    Attributes:
        rounds: of learning from scores; `minutes` are those since its beginning.
        bytes_received: of each rollout peer since then, by the kernel.
        share_of_bf16: blobs that a rollout peer received in a round, the commits' parts, over the weights in bf16.
        refused: honest groups that the trainer refused, of `taken` and these.
        curve: mean score of the groups of each round.
    """

    task: str
    seed: int
    before: float
    after: float
    control: float
    minutes: float
    rounds: int
    bytes_received: list[int]
    share_of_bf16: float
    taken: int
    refused: int
    deaths: list[str]
    curve: dict[str, float] = field(default_factory=dict)


def rate_of_right_answers(task: str) -> float:
    """Return the learning rate of the warm-up; at 4e-3 one of three seeds does not learn `reverse`."""
    return 4e-3 if task in EASY_TASKS else 2e-3


def make_manifest(task: str, seed: int, recipe: str) -> Manifest:
    """Build a run whose rollouts and steps take a core some tenths of a second.

    It learns right answers first, then answers with errors at a tenth of the rate, and then from scores.
    """
    right, rate = 10 if task in EASY_TASKS else 30, rate_of_right_answers(task)
    rounds, right_steps = right + ERRING_ROUNDS, right * WARM_UP_STEPS
    rl = {
        "task": task, "start_round": rounds, "group": 8, "groups": 16, "answer_tokens": 10,
        "rate_factor": SCORES_RATE / (rate / 10), "ahead": 0,
    }  # fmt: skip
    sources = [
        {"name": "right", "source": "questions", "path": task},
        {"name": "erring", "source": "text", "path": ERRING, "weight": 0.001},
    ]
    erring = {"tokens": right_steps * BATCH_TOKENS, "weights": {"right": 0, "erring": 1}}
    manifest = manifest_with(
        run={"seed": seed, "min_peers": 1},
        model={"width": 48, "layers": 2, "heads": 4, "hidden": 128, "context": 32},
        train={
            "batch_tokens": BATCH_TOKENS,
            "microbatch": 64,
            "learning_rate": rate,
            "warmup_steps": 20,
            "schedule": "wsd",
            "decay_steps": right_steps,
        },
        method={
            "recipe": recipe,
            "codec": {"kind": [{"value": "int8", "rounds": rounds}, "topk"]},
            "schedule": {"inner_steps": [{"value": WARM_UP_STEPS, "rounds": rounds}, INNER_STEPS]},
        },
        membership={"heartbeat": 1.0, "expiry": 10.0},
        target={"rounds": ENDLESS},
        rl=rl,
    )
    data = {"sources": sources, "phases": [erring], "chat": {"template": TEMPLATE}}
    values = manifest.model_dump(mode="json", by_alias=True, exclude_none=True) | {"data": data}
    return Manifest.model_validate_json(json.dumps(values))


def write_errors(folder: Path, task: str) -> None:
    """Write conversations whose answers are partly wrong."""
    with (folder / ERRING).open("w") as file:
        for question, answer in itertools.islice(answers_with_errors(task, RIGHT_ANSWERS, ERRING_SCORE), DOCUMENTS):
            talk = [("user", question.prompt.strip()), ("assistant", answer)]
            print(json.dumps({"messages": [{"role": role, "content": words} for role, words in talk]}), file=file)


class RolloutSwarm(LabSwarm):
    """A trainer in the first node, and rollout peers in the others."""

    def _words(self, index: int) -> tuple[str, ...]:
        return ("--role", "rollout") if index else ()


@contextlib.contextmanager
def running_rollout_swarm(folder: Path, manifest: Manifest) -> Iterator[RolloutSwarm]:
    """Build the links and start all peers; they are dead at the end."""
    with Laboratory() as laboratory, isolated_processes():
        nodes = [laboratory.ordinary_node(LINK) for _ in range(ROLLOUT_PEERS + 1)]
        swarm = RolloutSwarm(folder, manifest, laboratory, nodes)
        write_errors(swarm.run.parent, require_rl(manifest).task)
        try:
            swarm.start()
            yield swarm
        finally:
            swarm.kill()


class Flight:
    """One run, from its start to the goal or the end of its time."""

    def __init__(self, swarm: RolloutSwarm, minutes: float) -> None:
        self._swarm = swarm
        self._trainer, *self._makers = swarm.peers
        self._start_round = require_rl(swarm.manifest).start_round
        self._minutes = minutes
        self.deaths = list[str]()
        self.curve = dict[str, float]()
        self._noted = set[str]()
        self._counts = dict[str, tuple[int, int]]()  # taken and refused, by process of the trainer

    def fly(self) -> SwarmResult:
        """Learn right answers, then from scores."""
        swarm, manifest = self._swarm, self._swarm.manifest
        swarm.wait_until(
            lambda: self._follower_round() >= self._start_round, "right answers are learned", START_SECONDS
        )
        first, began = self._weights(), time.monotonic()
        before_bytes, before_blobs = self._received(), self._blobs()
        while time.monotonic() - began < 60 * self._minutes and not self._has_reached():
            self._look()
            self._kill_in_time()
            time.sleep(POLL_SECONDS)
        minutes, rounds = (time.monotonic() - began) / 60, self._follower_round() - self._start_round
        last, received = self._weights(), self._received()
        blobs = (self._blobs() - before_blobs) / max(1, rounds)
        taken, refused = (sum(counts[place] for counts in self._counts.values()) for place in range(2))
        asked = self._asked(rounds)
        return SwarmResult(
            task=require_rl(manifest).task,
            seed=manifest.run.seed,
            before=held_out_reward(manifest, first, asked),
            after=held_out_reward(manifest, last, asked),
            control=held_out_reward(manifest, first, asked, "again"),
            minutes=minutes,
            rounds=rounds,
            bytes_received=[after - before for after, before in zip(received, before_bytes, strict=True)],
            share_of_bf16=blobs / (BF16_BYTES * last.numel()),
            taken=taken,
            refused=refused,
            deaths=self.deaths,
            curve=self.curve,
        )

    def _asked(self, rounds: int) -> set[str]:
        """Return all prompts that a peer may have learned from."""
        manifest = self._swarm.manifest
        task, serials = require_rl(manifest).task, GroupLimits.of(manifest, INNER_STEPS).serials
        asked = {TASKS[task].question(RIGHT_ANSWERS, number).prompt for number in range(DOCUMENTS)}
        for maker in {status.peer_id for status in self._swarm.poll(*self._makers)}:
            numbers = range(self._start_round, self._start_round + rounds + 2)
            places = itertools.starmap(Place, itertools.product(numbers, range(serials)))
            asked |= {question_of(TASKS[task], manifest.run_id, maker, place).prompt for place in places}
        return asked

    def _look(self) -> None:
        for status in self._swarm.poll(self._trainer):
            learning = status.learning or LearningStatus()
            self._note(learning.rewards)
            self.curve |= learning.rewards
            makers = learning.makers.values()
            counts = sum(each.taken for each in makers), sum(each.refused for each in makers)
            self._counts[str(len(self.deaths) // 2)] = counts

    def _note(self, rewards: Mapping[str, float]) -> None:
        """Print the mean score of each round before the newest, which is not complete, once."""
        for number in sorted(rewards, key=int)[:-1]:
            if number not in self._noted:
                self._noted.add(number)
                print(f"round {number}: mean score {rewards[number]:.3f}", file=sys.stderr, flush=True)

    def _kill_in_time(self) -> None:
        """Let the last rollout peer die and come back, and then the trainer."""
        learned = len(self.curve)
        victim, first = self._makers[-1], self._swarm.lab_peers[0].public_addresses()
        if not self.deaths and learned >= FAULT_ROUNDS:
            self._kill(victim)
            time.sleep(AWAY_SECONDS)
            victim.start(first)
        elif len(self.deaths) == 1 and learned >= 2 * FAULT_ROUNDS:
            self._kill(self._trainer)
            self._trainer.start(self._swarm.lab_peers[1].public_addresses())

    def _kill(self, peer: PeerProcess) -> None:
        self._swarm.kill_peer(peer)
        self.deaths.append(peer.name)

    def _has_reached(self) -> bool:
        newest = [self.curve[number] for number in sorted(self.curve, key=int)[-NEWEST:]]
        return len(self.deaths) == 2 and len(newest) == NEWEST and sum(newest) / NEWEST >= GOAL + SURE

    def _follower_round(self) -> int:
        return max((status.round for status in self._followers()), default=0)

    def _followers(self) -> list[NodeStatus]:
        return self._swarm.poll(self._makers[0])

    def _weights(self) -> Tensor:
        """Read the newest weights that the first rollout peer holds."""
        numel = build_model(self._swarm.manifest.model).flat.numel()
        found = list[Tensor]()

        def has_read() -> bool:
            for status in self._followers():
                with contextlib.suppress(MissingFileError):  # a newer state has taken its place
                    found.append(read_anchor(self._makers[0].folder / "blobs" / status.state_digest, numel))
            return bool(found)

        self._swarm.wait_until(has_read, "weights to read")
        return found[0]

    def _received(self) -> list[int]:
        return [self._swarm.laboratory.interface_bytes(peer.node)[1] for peer in self._swarm.lab_peers[1:]]

    def _blobs(self) -> int:
        return sum(status.bytes_received_by_kind.get("blobs", 0) for status in self._followers())


@torch.no_grad()
def held_out_reward(manifest: Manifest, weights: Tensor, asked: Collection[str], noise: str = "") -> float:
    """Measure the mean score of answers to questions that were not asked in training."""
    rl, model = require_rl(manifest), build_model(manifest.model)
    model.load_flat(weights)
    encoder = QuestionEncoder(manifest, Path())
    questions = held_out_questions(rl.task, manifest.run_id, asked)
    keys = [noise_key(manifest.run_id, "held out", noise, number) for number in range(QUESTIONS)]
    drawn = complete(
        model, [encoder.prompt(each) for each in questions], rl.answer_tokens, Sampling(rl.temperature),
        encoder.usable, encoder.stops, keys, keeps_stops=True,
    )  # fmt: skip
    scores = (encoder.score(question, each.tokens) for question, each in zip(questions, drawn, strict=True))
    return sum(scores) / QUESTIONS


def held_out_questions(task: str, run: str, asked: Collection[str]) -> list[Question]:
    """Return questions with other prompts than these."""
    numbered = (TASKS[task].question(f"{run} held out", number) for number in itertools.count())
    return list(itertools.islice((each for each in numbered if each.prompt not in asked), QUESTIONS))


def measure_processes(task: str, seed: int, minutes: float, recipe: str) -> SwarmResult:
    """Measure one run. AssertionError if it does not come to learning from scores."""
    manifest = make_manifest(task, seed, recipe)
    with tempfile.TemporaryDirectory() as folder, running_rollout_swarm(Path(folder) / "run", manifest) as swarm:
        return Flight(swarm, minutes).fly()

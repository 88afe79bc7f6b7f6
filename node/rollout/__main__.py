"""`python -m node.rollout`: draw groups of rollouts for the daemon that started it, until its pipe closes."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from node.processes.process import TRAINER_NICENESS, lower_priority, rare_garbage_collection

with rare_garbage_collection():
    import numpy as np
    import torch
    from torch import Tensor

    from node.data.questions import QuestionEncoder
    from node.model.families import build_model
    from node.model.generate import Sampling, complete
    from node.model.interface import LanguageModel
    from node.model.weight_files import read_frozen
    from node.rollout.generator import DrawnGroup, DrawReply, DrawRequest, GeneratorConfig
    from node.trainer.devices.device import choose_device, device_class
    from optim.rollouts import noise_key
    from protocol.errors import MissingFileError, MurmurError
    from protocol.manifest.reading import parse_manifest
    from protocol.manifest.run import Manifest
    from protocol.rollout_groups import Place, noise_parts, question_of, require_rl


class Generator:
    """A model that answers the questions of a maker."""

    def __init__(self, config: GeneratorConfig) -> None:
        self._manifest = manifest = parse_manifest(config.manifest.encode(), "the run")
        self._maker = config.maker
        torch.set_num_threads(config.threads)
        self._device = choose_device(config.device)
        frozen = read_frozen(manifest.model, config.base)
        self._model: LanguageModel = build_model(manifest.model, self._device, frozen=frozen)
        self._encoder = QuestionEncoder(manifest, config.base)
        self._round = -1
        self.device_class = device_class(self._device)

    @classmethod
    def open(cls, line: str) -> Self:
        """Build the generator that the first line describes. Raises MurmurError."""
        return cls(GeneratorConfig.model_validate_json(line))

    def draw(self, request: DrawRequest) -> tuple[DrawnGroup, ...]:
        """Answer the questions of the groups. Raises MissingFileError if the state is gone, CheckpointError."""
        if request.round != self._round:
            weights = read_anchor(request.state, self._model.flat.numel())
            self._model.load_flat(weights.to(self._device))
            self._round = request.round
        places = [Place(request.round, serial) for serial in request.serials]
        return draw_groups(self._model, self._encoder, self._manifest, self._maker, places)


def draw_groups(
    model: LanguageModel, encoder: QuestionEncoder, manifest: Manifest, maker: str, places: Sequence[Place]
) -> tuple[DrawnGroup, ...]:
    """Draw all answers of the groups together, each by the public noise of its place."""
    rl, run_id = require_rl(manifest), manifest.run_id
    texts = [(place, sample) for place in places for sample in range(rl.group)]
    prompts = {place: encoder.prompt(question_of(encoder.tasks[rl.task], run_id, maker, place)) for place in places}
    keys = [noise_key(*noise_parts(run_id, maker, place, sample)) for place, sample in texts]
    drawn = complete(
        model, [prompts[place] for place, _ in texts], rl.answer_tokens, Sampling(rl.temperature), encoder.usable,
        encoder.stops, keys, keeps_stops=True,
    )  # fmt: skip
    found = list[DrawnGroup]()
    for number, place in enumerate(places):
        answers = drawn[number * rl.group : (number + 1) * rl.group]
        tokens = tuple(tuple(answer.tokens) for answer in answers)
        # Rounding may lift the probability of a certain token above 1.
        log_probabilities = tuple(tuple(min(0.0, value) for value in answer.log_probabilities) for answer in answers)
        found.append(DrawnGroup(serial=place.serial, tokens=tokens, log_probabilities=log_probabilities))
    return tuple(found)


def read_anchor(path: Path, numel: int) -> Tensor:
    """Read the anchor, (numel,) fp32, with which a stored state begins. Raises MissingFileError if it is gone."""
    try:
        values = np.fromfile(path, np.float32, numel)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is gone; the next state is there") from error
    if len(values) != numel:
        raise MissingFileError(f"{path} is not whole; the next state is there")
    return torch.from_numpy(values)


def main() -> int:
    """Answer each line of standard input with one line; returns the exit code of an error, after one line on stderr."""
    lower_priority(TRAINER_NICENESS)
    try:
        generator = Generator.open(sys.stdin.readline())
        for line in sys.stdin:
            print(_answer(generator, DrawRequest.model_validate_json(line)).model_dump_json(), flush=True)
    except MurmurError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


def _answer(generator: Generator, request: DrawRequest) -> DrawReply:
    began = time.monotonic()
    try:
        groups = generator.draw(request)
    except MissingFileError:
        return DrawReply(lacks_state=True)
    return DrawReply(device=generator.device_class, seconds=time.monotonic() - began, groups=groups)


if __name__ == "__main__":
    sys.exit(main())

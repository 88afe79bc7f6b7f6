"""Sample text from the newest model now and then, in a process of its own, and record it as an event.

The process has a low priority and a deadline, so neither the host nor a trainer on its machine waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.dashboard.event_log import EventLog
from node.dashboard.events import MAX_SAMPLE_CHARACTERS, SampleGenerated
from node.paths import find_newest_model
from node.processes.workers import run_module
from protocol.errors import MurmurError
from protocol.fault_words import describe_faults

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
SAMPLE_SECONDS = 300.0  # between two samples
YOUNG_SAMPLE_SECONDS = 30.0  # the same while the model has trained twice as long since, and changes quickly
LAST_SAMPLE_SECONDS = 15.0  # the same once the run has reached its target
DEADLINE_SECONDS = 120.0  # for one sample
MODULE = "node.dashboard.samples"


class Sample(BaseModel):
    """The line that the process prints: text of the model after `round` rounds, which continues the prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int = Field(ge=0)
    prompt: str = Field(max_length=MAX_SAMPLE_CHARACTERS)
    text: str = Field(max_length=MAX_SAMPLE_CHARACTERS)


def is_sample_due(
    newest_round: int | None, sampled_round: int | None, seconds_since_attempt: float, is_over: bool
) -> bool:
    """Return whether to sample now. `None` means that there is no model, or no sample yet."""
    if newest_round is None or newest_round == sampled_round:
        return False
    if is_over:
        return seconds_since_attempt >= LAST_SAMPLE_SECONDS
    is_young = sampled_round is not None and newest_round >= 2 * sampled_round
    return seconds_since_attempt >= (YOUNG_SAMPLE_SECONDS if is_young else SAMPLE_SECONDS)


class Sampler:
    """Samples from the newest checkpoint in the `folders` of nodes, and records what the model writes.

    `base` is the folder of the manifest, from which the first prompt's text is read.
    """

    def __init__(
        self, folders: Sequence[Path], base: Path, event_log: EventLog, clock: Callable[[], float] = time.time
    ) -> None:
        self._folders = tuple(folders)
        self._base = base
        self._event_log = event_log
        self._clock = clock
        self._attempted_at = float("-inf")
        self._failure = ""
        self._sampling = asyncio.Lock()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample_if_due()
            await asyncio.sleep(POLL_SECONDS)

    async def sample_if_due(self) -> None:
        """Record a sample if one is due."""
        state, model = self._event_log.state, find_newest_model(self._folders)
        sampled = state.sample.round if state.sample else None
        since, is_over = self._clock() - self._attempted_at, state.is_over
        if is_sample_due(model[0] if model else None, sampled, since, is_over):
            await self.sample_now()

    async def sample_now(self) -> None:
        """Record a sample of the newest model unless it has one; log why not, once for each reason."""
        async with self._sampling:
            await self._sample()

    async def _sample(self) -> None:
        state, model = self._event_log.state, find_newest_model(self._folders)
        if model is None or (state.sample is not None and state.sample.round == model[0]):
            return
        self._attempted_at = self._clock()
        try:
            sample = await generate_sample(model[1], self._base, state.sample.prompt if state.sample else None)
        except MurmurError as error:
            if str(error) != self._failure:
                logger.warning("no sample of the model: %s", error)
            self._failure = str(error)
            return
        self._failure = ""
        event = SampleGenerated(at=self._clock(), round=sample.round, prompt=sample.prompt, text=sample.text)
        self._event_log.record(event)


async def generate_sample(folder: Path, base: Path, prompt: str | None, seconds: float = DEADLINE_SECONDS) -> Sample:
    """Run the process on a node's folder; without a prompt, it chooses one. Raises MurmurError."""
    words = [str(folder), str(base), *([] if prompt is None else [prompt])]
    try:
        child = await run_module(MODULE, words, seconds)
    except TimeoutError as error:  # before OSError, of which it is one
        raise MurmurError(f"it took longer than {seconds:g} s") from error
    except OSError as error:
        raise MurmurError(f"the process cannot be started: {error.strerror}") from error
    if child.exit_code != 0:
        raise MurmurError(child.last_error or f"the process ended with exit code {child.exit_code}")
    try:
        return Sample.model_validate_json(child.output)
    except ValidationError as error:
        raise MurmurError(f"the process printed no sample: {describe_faults(error)}") from error

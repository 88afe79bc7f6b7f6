"""The settings of the inner steps after an anchor, which revisions and the tokens of the run decide."""

from pydantic import BaseModel, ConfigDict

from protocol.manifest.run import Manifest
from protocol.manifest.sections import TrainSection


class StepSettings(BaseModel):
    """The settings of one round.

    The learning rate of `train` has the factor of the final anneal; `weights` are those of the sources of text, in the
    order of the manifest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: TrainSection
    weights: tuple[float, ...]


def step_settings(manifest: Manifest, rounds: int, tokens: int) -> StepSettings:
    """Return the settings of the steps after `rounds` and `tokens`; `manifest` is that of the round."""
    rate = manifest.train.learning_rate * manifest.rate_factor(rounds, tokens)
    train = manifest.train.model_copy(update={"learning_rate": rate})
    return StepSettings(train=train, weights=manifest.source_weights(rounds, tokens))

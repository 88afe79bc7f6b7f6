"""Train in a swarm with a loop of your own.

    swarm = murmuration.join("run.toml", model, optimizer)
    for batch in loader:
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
        if not swarm.step(tokens=batch.numel(), loss=loss):
            break
    swarm.close()

`docs/user/own-loop.md` explains it.
"""

from murmuration.describing import describe
from murmuration.joining import join, transformers_config
from murmuration.swarm import Swarm
from protocol.errors import MurmurError

__all__ = ["MurmurError", "Swarm", "describe", "join", "transformers_config"]

"""Train in a swarm with a loop of your own.

    swarm = murmuration.join("run.toml", model, optimizer)
    for batch in loader:
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
        if not swarm.step(tokens=batch.numel(), loss=loss):
            break
    swarm.close()

`docs/user/own-loop.md` explains it. `check_component` is for methods of your own (`docs/user/own-method.md`).
"""

from murmuration.describing import describe
from murmuration.joining import join, transformers_config
from murmuration.swarm import Swarm
from optim.component_checks import check_component
from protocol.errors import MurmurError

__all__ = ["MurmurError", "Swarm", "check_component", "describe", "join", "transformers_config"]

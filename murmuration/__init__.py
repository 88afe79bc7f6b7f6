"""Train in a swarm with a loop of your own.

    swarm = murmuration.join("run.toml", model, optimizer)
    for batch in loader:
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
        if not swarm.step(tokens=batch.numel(), loss=loss):
            break
    swarm.close()

`docs/user/own-loop.md` explains it. `check_component` is for methods and tasks of your own
(`docs/user/own-method.md`, `docs/user/own-task.md`).
"""

from murmuration.describing import describe
from murmuration.joining import join, transformers_config
from murmuration.swarm import Swarm
from node.task_checks import check_task
from optim import component_checks
from protocol.errors import MurmurError
from protocol.scored_tasks import ScoredTask

__all__ = ["MurmurError", "Swarm", "check_component", "describe", "join", "transformers_config"]


def check_component(component: object, context: int | None = None) -> list[str]:
    """Return a line for each promise that a part of a method, or a task, breaks; an empty list if there is none.

    Args:
        component: an instance, with the options to check, or a class.
        context: of the model that a task is for; its questions and right answers must fit into it as bytes.
    """
    if isinstance(component, ScoredTask) or (isinstance(component, type) and issubclass(component, ScoredTask)):
        return check_task(component, context)
    return component_checks.check_component(component)

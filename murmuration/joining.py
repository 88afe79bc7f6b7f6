"""Join a run with a model and an optimizer of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from murmuration.daemon import NodeProcess
from murmuration.own_model import OwnModel
from murmuration.swarm import Evaluation, OwnLoop, Swarm, UnknownOptimizer
from node.commands.join.invitation import open_or_recall
from node.from_manifest import build_node_program, build_own_loop_program
from node.model import model_family
from node.paths import join_dir
from node.trainer.ipc.channel import TrainerChannel, TrainerConfig
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.live import live_vectors
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from protocol.errors import MurmurError
from protocol.manifest.reading import parse_manifest

CONFIG_SECONDS = 60.0


def transformers_config(run: str | Path) -> dict[str, Any]:
    """Return the configuration of a run's model for transformers: `AutoConfig.for_model(**transformers_config(run))`.

    Raises MurmurError if the run cannot be read.
    """
    model = open_or_recall(str(run), None, insecure=False).manifest.model
    return model_family(model).hugging_face_config(model)


def join(
    run: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    folder: str | Path | None = None,
    evaluate: Evaluation | None = None,
    arguments: Sequence[str] = (),
    log: Sequence[str] = (),
) -> Swarm:
    """Take part in a run with your own training loop.

    The call starts a node in the background (`murmur join RUN --own-loop`), or finds the one that an earlier loop left,
    and loads the run's weights into the model. It returns when the first step may be made.

    Args:
        run: a manifest, a URL or a link, as for `murmur join`.
        model: a module with the names and shapes of the run's model, or with those that transformers gives them; fp32.
            Its parameters become views of one vector; an optimizer made before stays valid.
        optimizer: for its learning rate on the page, and for `Swarm.state_dict`.
        folder: of the node: key, checkpoints, log; by default the one that `murmur join` would use.
        evaluate: measures the model's validation loss (mean nats per token, tokens) when it is this peer's turn;
            without it others do.
        arguments: more options of `murmur join`, such as ["--name", "mary", "--upload", "20mbit"].
        log: loggers of a node that this call starts, next to metrics.jsonl in its folder: "tensorboard", "wandb".

    Raises:
        UsageError: The model is not the run's, or the run's method exchanges more than weights.
        MurmurError: The node cannot start; the text is its own line.
    """
    place = Path(folder) if folder is not None else None
    invitation = open_or_recall(str(run), place, insecure=False)
    build_own_loop_program(invitation.manifest)  # a run that does not fit must fail before a node starts
    own = OwnModel(model, invitation.manifest)
    daemon = NodeProcess((place or invitation.folder or join_dir(invitation.manifest)).resolve())
    connection, memory_fds = daemon.connect(str(run), [*arguments, *(word for name in log for word in ("--log", name))])
    channel = TrainerChannel(connection)
    config = channel.receive(CONFIG_SECONDS)
    if not isinstance(config, TrainerConfig):
        raise MurmurError(f"the node sent no config within {CONFIG_SECONDS:.0f} s; see {daemon.folder}/daemon.log")
    if parse_manifest(config.manifest.encode(), "the node's manifest").run_id != invitation.manifest.run_id:
        raise MurmurError(f"the node in {daemon.folder} takes part in another run; give this loop its own folder")
    program = build_node_program(invitation.manifest, config.options.memory_mode, own_loop=True)
    memory = SharedMemory.attach(memory_fds, SharedLayout.of(program))
    unknown = UnknownOptimizer()
    state = TrainerState(live_vectors(own, unknown), unknown, program, ContributionEncoder(program), memory)
    return Swarm(OwnLoop(config, state, memory, channel, own, evaluate), daemon, optimizer)

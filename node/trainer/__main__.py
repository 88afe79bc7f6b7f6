"""The trainer process: `python -m node.trainer PARENT CHANNEL MEMORY [FILE] [ACTIVATIONS]`.

PARENT is the daemon's process id; the others are inherited file descriptors (see channel, shared_memory and
activation_memory in node.trainer.ipc): FILE only with little memory, the last one only for a stage of a pipeline. The
first message on the channel is TrainerConfig. The process opens no socket, unless it has other ranks
(node.trainer.ranks), and no shared memory of its own, ignores Ctrl-C (the daemon decides), has a lower priority than
the daemon, and dies with it.

Exit codes: 0 if the daemon stopped it or is gone; a code of protocol.errors if it cannot continue (it sends the reason
as Failed first); anything else is a crash (it sends Crashed first, unless a signal ends it).
"""

import ctypes
import logging
import os
import signal
import socket
import sys

from node.processes.process import TRAINER_NICENESS, lower_priority, rare_garbage_collection

CONFIG_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run the process; returns its exit code."""
    parent, channel_fd, *memory_fds = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    lower_priority(TRAINER_NICENESS)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    return train_until_stopped(socket.socket(fileno=channel_fd), memory_fds)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the daemon dies, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)  # the daemon died before this request


def train_until_stopped(connection: socket.socket, memory_fds: list[int]) -> int:
    """Train until the daemon sends Stop; returns the exit code."""
    # Importing torch takes seconds, in which the daemon may die: so only after die_with_parent.
    with rare_garbage_collection():
        import torch

        from node.from_manifest import build_node_program
        from node.trainer.ending import describe_end
        from node.trainer.ipc.activation_memory import ActivationMemory
        from node.trainer.ipc.channel import ChannelClosed, Failed, TrainerChannel, TrainerConfig
        from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
        from node.trainer.loop import Trainer
        from protocol.errors import MurmurError
        from protocol.manifest.reading import parse_manifest
        from protocol.pipeline.stage import StageManifest

    channel, memory = TrainerChannel(connection), None
    try:
        config = channel.receive(CONFIG_SECONDS)
        if not isinstance(config, TrainerConfig):
            raise MurmurError(f"the daemon sent no config within {CONFIG_SECONDS:.0f} s; start it again")
        memory = config.options.memory
        torch.set_num_threads(config.options.thread_count)
        manifest, stage = parse_manifest(config.manifest.encode(), "the daemon's manifest"), config.stage
        manifest = StageManifest.of(manifest, stage.stage) if stage else manifest
        program = build_node_program(manifest, config.options.memory_mode)
        activations = ActivationMemory.attach(memory_fds.pop(), stage.slots) if stage else None
        shared = SharedMemory.attach(memory_fds, SharedLayout.of(program))
        Trainer(config, manifest, program, shared, channel, activations).run()
    except ChannelClosed:
        logger.info("the daemon is gone; stopping")
    except Exception as error:
        end = describe_end(error, memory)
        channel.send(end)
        return end.exit_code if isinstance(end, Failed) else 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

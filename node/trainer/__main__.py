"""The trainer process: `python -m node.trainer PARENT CHANNEL MEMORY [ACTIVATIONS]`.

PARENT is the daemon's process id; the others are inherited file descriptors (see node.ipc.channel,
node.ipc.shared_memory, node.ipc.activation_memory), the last one only for a stage of a pipeline. The first message on
the channel is TrainerConfig. The process opens no socket and no shared memory of its own, ignores Ctrl-C (the daemon
decides), has a lower priority than the daemon, and dies with it.

Exit codes: 0 if the daemon stopped it or is gone; a code of protocol.errors if it cannot continue (it sends the reason
as Failed first); anything else is a crash (it sends Crashed first, unless a signal ends it).
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from node.process import TRAINER_NICENESS, lower_priority, rare_garbage_collection

if TYPE_CHECKING:
    from node.ipc.channel import TrainerChannel
    from protocol.errors import MurmurError

CONFIG_SECONDS = 60.0
MAX_REASON_CHARACTERS = 300
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

        from node.from_manifest import build_program
        from node.ipc.activation_memory import ActivationMemory
        from node.ipc.channel import ChannelClosed, Crashed, TrainerChannel, TrainerConfig
        from node.ipc.shared_memory import SharedLayout, SharedMemory
        from node.monitoring.logs import sanitize
        from node.trainer.device import exit_code_of, is_out_of_memory
        from node.trainer.loop import Trainer
        from protocol.errors import DeviceError, MurmurError
        from protocol.manifest import parse_manifest
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
        program = build_program(manifest)
        shared = SharedMemory.attach(memory_fds[0], SharedLayout.of(program))
        activations = ActivationMemory.attach(memory_fds[1], stage.slots) if stage else None
        Trainer(config, manifest, program, shared, channel, activations).run()
    except ChannelClosed:
        logger.info("the daemon is gone; stopping")
    except MurmurError as error:
        return _send_failed(channel, error)
    except Exception as error:
        if memory is not None and is_out_of_memory(error):
            return _send_failed(channel, DeviceError(f"--memory: {memory / 1e6:.0f} MB do not suffice; allow more"))
        frames = traceback.extract_tb(error.__traceback__)
        calls = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        logger.info("calls before the crash: %s", calls)
        channel.send(Crashed(reason=sanitize(_describe_crash(error)), exit_code=exit_code_of(error)))
        return 1
    finally:
        channel.close()
    return 0


def _describe_crash(error: Exception) -> str:
    """Describe an error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "unknown place"
    text = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return f"{type(error).__name__}: {text} ({place})"


def _send_failed(channel: "TrainerChannel", error: "MurmurError") -> int:
    from node.ipc.channel import Failed
    from node.monitoring.logs import sanitize

    channel.send(Failed(reason=sanitize(str(error)), exit_code=error.exit_code))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

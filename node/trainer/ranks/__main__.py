"""A rank besides the first: `python -m node.trainer.ranks PARENT CHANNEL DAEMON [MEMORY STORE]`.

PARENT is the process id of rank 0, or of `murmur rank` on another machine; the others are inherited file descriptors:
the channel of rank 0, the daemon's channel for the reason of a crash, and, on the machine of rank 0, the shared memory
and the file in which the ranks meet. The process ends with its parent, ignores Ctrl-C, and has the priority of a
trainer. Exit code 0: rank 0 said that this is the end; ABANDONED: rank 0 is gone.
"""

import logging
import signal
import socket
import sys
import time

from node.processes.process import rare_garbage_collection
from node.trainer.__main__ import CONFIG_SECONDS, die_with_parent

ABANDONED = 75


def main(arguments: list[str]) -> int:
    """Run the process; returns its exit code."""
    parent, channel_fd, daemon_fd, *inherited = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    return work_until_ended(socket.socket(fileno=channel_fd), socket.socket(fileno=daemon_fd), inherited)


def work_until_ended(connection: socket.socket, daemon: socket.socket, inherited: list[int]) -> int:
    """Carry out the commands of rank 0 until it says that this is the end; returns the exit code."""
    with rare_garbage_collection():
        from node.trainer.ending import describe_end
        from node.trainer.ipc.channel import ChannelClosed, FrameSocket, TrainerChannel
        from node.trainer.ranks.leader import GRACE_SECONDS
        from node.trainer.ranks.messages import TO_RANK, RankConfig
        from node.trainer.ranks.rank import follow
        from protocol.errors import MurmurError

    channel, memory = FrameSocket(connection), None
    try:
        config = channel.receive_as(TO_RANK, CONFIG_SECONDS if inherited else None)
        if not isinstance(config, RankConfig):
            raise MurmurError(f"rank 0 sent no config within {CONFIG_SECONDS:.0f} s")
        memory = config.trainer.options.memory
        follow(config, channel, inherited)
    except ChannelClosed:
        return ABANDONED
    except Exception as error:
        time.sleep(GRACE_SECONDS)  # if the cause is another rank that died, this process is killed meanwhile
        TrainerChannel(daemon).send(describe_end(error, memory))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

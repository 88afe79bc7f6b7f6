"""A peer whose trainer makes every second step only: `python -m tests.swarm.peers.lazy_peer join RUN ...`."""

import node.trainer.ipc.trainer_process
from node.cli import main

if __name__ == "__main__":
    node.trainer.ipc.trainer_process.TRAINER_MODULE = "tests.swarm.peers.lazy_trainer"
    main()

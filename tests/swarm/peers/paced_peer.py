"""A peer whose trainer sleeps after each step: `python -m tests.swarm.peers.paced_peer join RUN ...`.

Its rounds take at least as long as the sleeps, however fast the machine is, and leave the processors to others.
"""

import node.trainer.ipc.trainer_process
from node.cli import main

if __name__ == "__main__":
    node.trainer.ipc.trainer_process.TRAINER_MODULE = "tests.swarm.peers.paced_trainer"
    main()

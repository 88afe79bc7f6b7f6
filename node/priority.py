"""Who goes first where all want the processors at once: what a round waits for, then the trainer, then the rest."""

import os
import sys

# Where the model is computed on the processors, a round's few milliseconds would each wait for an inner step's many,
# and in the end the trainer for the round.
TRAINER_NICENESS = 5
LOW_PRIORITY_NICENESS = 10  # what nobody waits for


def lower_priority(niceness: int) -> None:
    """From here on this thread, and those that it starts, come so far behind the other threads of a daemon.

    Elsewhere than on Linux a niceness is a whole process's: there all threads stay alike.
    """
    if sys.platform == "linux":
        os.nice(niceness)

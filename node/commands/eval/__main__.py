"""`python -m node.commands.eval FOLDER [TASK...]`: evaluate the newest model in a folder during other work.

The process is the first one that the kernel ends when memory is short.
"""

import os
import sys

import torch

from node.commands.eval.command import EvalOptions, evaluate
from node.processes.workers import give_way
from protocol.errors import MurmurError


def main(arguments: list[str]) -> int:
    """Evaluate, and note the results; returns the exit code of an error, after one line on standard error."""
    give_way()
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"  # the progress bars of lm-eval
    try:
        evaluate(EvalOptions(source=arguments[0], tasks=tuple(arguments[1:]), device="cpu"))
    except MurmurError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

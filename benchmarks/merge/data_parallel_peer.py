"""Data parallel training as it is done in a data centre: gradients in fp32, summed by gloo in every step."""

import time
from contextlib import suppress
from pathlib import Path

from torch import distributed

from benchmarks.merge.gloo_group import gloo_parser, join_group
from benchmarks.merge.training_step import Stepper


def main() -> None:
    parser = gloo_parser()
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--steps", type=int, help="of a turn")
    words = parser.parse_args()
    conversation = join_group(words)
    stepper = Stepper(words.manifest, words.rank)
    conversation.send()
    while True:
        conversation.receive()
        conversation.send(compute_share=share(stepper, words.steps, words.peers))


def share(stepper: Stepper, steps: int, peers: int) -> float:
    """Of the time of some steps, how much was no exchange."""
    began, exchanging = time.monotonic(), 0.0
    for _ in range(steps):
        gradient = stepper.gradient()
        sent = time.monotonic()
        distributed.all_reduce(gradient)
        exchanging += time.monotonic() - sent
        gradient /= peers
        stepper.apply()
    return 1 - exchanging / (time.monotonic() - began)


if __name__ == "__main__":
    with suppress(EOFError):  # whoever gave the orders is gone
        main()

"""torch.distributed's all-reduce over gloo: fp32, one process group, all processes trusted and none ever lost."""

import argparse
import os
from contextlib import suppress

import torch
from torch import distributed

from benchmarks.merge.values import relative_error, vector
from benchmarks.merge.worker import Conversation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--peers", type=int)
    parser.add_argument("--numel", type=int)
    parser.add_argument("--address", help="of this machine, for the others")
    parser.add_argument("--device", help="the network device to use")
    parser.add_argument("--port", type=int)
    words = parser.parse_args()
    conversation = Conversation()
    os.environ["GLOO_SOCKET_IFNAME"] = words.device
    torch.set_num_threads(1)
    conversation.say(address=words.address)
    first = conversation.hear()["addresses"][0]
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{first}:{words.port}", rank=words.rank, world_size=words.peers
    )
    conversation.say()
    own = vector(words.rank, words.numel)
    merged = own.clone()
    while True:
        match next(iter(conversation.hear())):
            case "prepare":
                merged.copy_(own)
                conversation.say()
            case "go":
                distributed.all_reduce(merged)
                merged /= words.peers
                conversation.say(members=words.peers)
            case "check":
                conversation.say(relative_error=relative_error(merged, words.peers))


if __name__ == "__main__":
    with suppress(EOFError):  # whoever gave the orders is gone
        main()

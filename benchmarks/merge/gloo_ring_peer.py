"""torch.distributed's all-reduce over gloo: fp32, one process group, all processes trusted and none ever lost."""

from contextlib import suppress

from torch import distributed

from benchmarks.merge.gloo_group import gloo_parser, join_group
from benchmarks.merge.random_vectors import random_vector, relative_error


def main() -> None:
    parser = gloo_parser()
    parser.add_argument("--numel", type=int)
    words = parser.parse_args()
    conversation = join_group(words)
    conversation.send()
    own = random_vector(words.rank, words.numel)
    merged = own.clone()
    while True:
        match next(iter(conversation.receive())):
            case "prepare":
                merged.copy_(own)
                conversation.send()
            case "go":
                distributed.all_reduce(merged)
                merged /= words.peers
                conversation.send(members=words.peers)
            case "settle":
                conversation.send()
            case "check":
                conversation.send(relative_error=relative_error(merged, words.peers))


if __name__ == "__main__":
    with suppress(EOFError):  # whoever gave the orders is gone
        main()

"""Train in a swarm with a plain torch loop: python examples/own_loop.py RUN [--dir DIR] [OPTIONS OF murmur join].

The model is the one that transformers builds for the run, the text are the sources of Python's own library as bytes.
Ctrl-C leaves the run. After a crash the same command goes on.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import murmuration

SEQUENCES, CONTEXT = 16, 128


def batches(first: int) -> Iterator[torch.Tensor]:
    """Yield (sequences, context) bytes for ever, from step `first` on. Any loader of yours does as well."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    while True:
        places = torch.randint(len(text) - CONTEXT, (SEQUENCES,), generator=torch.Generator().manual_seed(first))
        yield torch.stack([text[place : place + CONTEXT] for place in places]).long()
        first += 1


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="manifest, URL or link of the run")
    parser.add_argument("--dir", help="folder of the node (default: that of the run)")
    words, options = parser.parse_known_args()

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**murmuration.transformers_config(words.run)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    with murmuration.join(words.run, model, optimizer, folder=words.dir, arguments=options) as swarm:
        for batch in batches(swarm.steps):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if swarm.steps % 20 == 0:
                print(f"round {swarm.round}, step {swarm.steps}, loss {loss.item():.3f}", flush=True)
            if not swarm.step(tokens=batch.numel(), loss=loss.detach()):
                break
        print(f"left at round {swarm.round}, step {swarm.steps}", flush=True)


if __name__ == "__main__":
    main()

"""Train a model of your own kind in a swarm: python examples/custom_model.py RUN [--dir DIR] [OPTIONS OF murmur join].

A small convolutional net learns to tell eight noisy patterns apart. `--describe FILE` writes the file that the
manifest names: `model = { kind = "custom", tensors = "FILE" }`. Ctrl-C leaves the run; the same command goes on.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import murmuration

CLASSES, SIDE, BATCH = 8, 8, 64


def build_model() -> nn.Module:
    """Build a net that takes images (B, 1, side, side) and returns logits (B, classes)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, CLASSES)
    )


def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and their classes for ever, from step `first` on."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    while True:
        generator = torch.Generator().manual_seed(first)
        classes = torch.randint(CLASSES, (BATCH,), generator=generator)
        yield patterns[classes] + torch.randn(BATCH, 1, SIDE, SIDE, generator=generator), classes
        first += 1


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="manifest, URL or link of the run")
    parser.add_argument("--dir", help="folder of the node (default: that of the run)")
    parser.add_argument("--describe", metavar="FILE", help="write names and shapes of the model, and end")
    words, options = parser.parse_known_args()

    model = build_model()
    if words.describe:
        murmuration.describe(model, words.describe)
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with murmuration.join(words.run, model, optimizer, folder=words.dir, arguments=options) as swarm:
        for images, classes in batches(swarm.steps):
            loss = functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not swarm.step(tokens=len(images), loss=loss.detach()):
                break
        print(f"left at round {swarm.round}, step {swarm.steps}, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()

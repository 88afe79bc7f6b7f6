"""Train in a swarm with transformers' Trainer: python examples/hugging_face.py RUN [--dir DIR] [OPTIONS OF join].

It needs `pip install transformers accelerate`. The text are the sources of Python's own library as bytes.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import murmuration
from murmuration.hugging_face import SwarmCallback

SEQUENCES, CONTEXT = 16, 128


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Windows of text, one byte a token."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = bytearray(b"".join(file.read_bytes() for file in files))

    def __len__(self) -> int:
        return len(self._text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.frombuffer(self._text, dtype=torch.uint8, count=CONTEXT, offset=index * CONTEXT).long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="manifest, URL or link of the run")
    parser.add_argument("--dir", help="folder of the node (default: that of the run)")
    words, options = parser.parse_known_args()

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**murmuration.transformers_config(words.run)))
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=SEQUENCES,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_steps=1_000_000,  # the run ends before, and the callback's bar shows how far it is
        disable_tqdm=True,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    callback = SwarmCallback(words.run, folder=words.dir, arguments=options)
    Trainer(model=model, args=arguments, train_dataset=Bytes(), callbacks=[callback]).train()
    assert callback.swarm is not None
    print(f"left at round {callback.swarm.round}, step {callback.swarm.steps}", flush=True)


if __name__ == "__main__":
    main()

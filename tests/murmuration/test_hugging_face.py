"""The Trainer's callback counts the tokens that are trained on, and reports losses as the Trainer means them."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import murmuration.hugging_face
from murmuration.hugging_face import SwarmCallback
from protocol.errors import UsageError

ROWS, LENGTH, STEPS = 4, 32, 3


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows, whose first `real` tokens have labels."""

    def __init__(self, real: int = LENGTH) -> None:
        self._real = real

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, 256, (LENGTH,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(LENGTH) < self._real).long()
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def reported(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: Rows,
    loss: Any = None,
    logged: list[float] | None = None,
    **options: Any,
) -> list[tuple[int, float]]:
    """Train without a swarm, and return the tokens and the loss that each step reports; adds the Trainer's losses."""
    steps: list[tuple[int, float]] = []

    def step(*, tokens: int, loss: float) -> bool:
        steps.append((tokens, loss))
        return True

    fake = SimpleNamespace(is_over=False, step=step, close=lambda leave: None, round=1, steps=2, progress=0.5)
    monkeypatch.setattr(murmuration.hugging_face, "join", lambda *_, **__: fake)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    plain = {
        "per_device_train_batch_size": ROWS,
        "learning_rate": 0.0,
        "max_steps": STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
    }
    arguments = TrainingArguments(str(folder), **(plain | options))
    model = AutoModelForCausalLM.from_config(config)
    callback = SwarmCallback("run.toml")
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback], compute_loss_func=loss)
    trainer.train()
    logged = [] if logged is None else logged
    logged.extend(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return steps


def test_padding_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [tokens for tokens, _ in reported(tmp_path, monkeypatch, Rows())] == [ROWS * LENGTH] * STEPS
    assert [tokens for tokens, _ in reported(tmp_path, monkeypatch, Rows(real=8))] == [ROWS * 8] * STEPS


def test_accumulated_passes_report_the_mean_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate is 0, so the loss of random rows is that of a guess in both."""
    one = reported(tmp_path, monkeypatch, Rows())
    four = reported(tmp_path, monkeypatch, Rows(), gradient_accumulation_steps=4)
    assert [tokens for tokens, _ in four] == [4 * ROWS * LENGTH] * STEPS
    assert one[0][1] == pytest.approx(four[0][1], abs=0.05) and one[0][1] > 5


def test_losses_that_the_model_does_not_return_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="label_smoothing_factor: the callback reports the loss that the model"):
        reported(tmp_path, monkeypatch, Rows(), label_smoothing_factor=0.1)
    with pytest.raises(UsageError, match="the model returned no loss"):
        reported(tmp_path, monkeypatch, Rows(), loss=lambda output, labels, **_: output.logits.mean())


@settings(max_examples=6, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(passes=st.integers(1, 4), rows=st.integers(1, 4), real=st.integers(2, LENGTH))
def test_reported_losses_are_those_that_the_trainer_logs(passes: int, rows: int, real: int) -> None:
    """With any accumulation, batch and padding; the Trainer rounds what it logs to four digits."""
    logged: list[float] = []
    options = {"gradient_accumulation_steps": passes, "per_device_train_batch_size": rows, "logging_steps": 1}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
        steps = reported(Path(folder), patches, Rows(real), logged=logged, **options)
    assert [tokens for tokens, _ in steps] == [passes * rows * real] * STEPS
    assert [loss for _, loss in steps] == pytest.approx(logged, abs=2e-4) and len(logged) == STEPS

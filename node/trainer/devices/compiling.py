"""Build the model that a trainer trains, compiled where the volunteer asks for it and the machine can.

A machine that cannot compile trains all the same, at the speed of before; the trainer says so in one line.
"""

import os
from pathlib import Path
from typing import Final

import torch

from node.model import LanguageModel, build_compiled_model, build_model, cut_of, has_compiler
from node.options import TrainerOptions
from node.trainer.devices.device import is_out_of_memory
from protocol.manifest import Manifest

CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
MAX_REASON_CHARACTERS: Final = 200


def build_trained_model(
    manifest: Manifest, device: torch.device, microbatch: int, options: TrainerOptions
) -> tuple[LanguageModel, str]:
    """Build the model, or the stage, on `device`; return it, and why it is not compiled although it should be.

    Args:
        microbatch: sequences of one forward pass, for which the program is compiled.
        options: whether to compile the model, which a stage of a pipeline never is, and how to keep weights and
            activations.
    """
    plain = _prepare(build_model(manifest.model, device, cut_of(manifest)), options)
    if not options.compile:
        return plain, ""
    if manifest.pipeline.is_cut:
        return plain, "a stage of a pipeline is not compiled"
    if device.type == "cpu" and not has_compiler():
        return plain, "there is no C++ compiler (g++ or clang++)"
    os.environ.setdefault(CACHE_VARIABLE, str(_cache_directory()))
    model = _prepare(build_compiled_model(manifest.model, device), options)
    try:
        _try(model, microbatch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return plain, f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON_CHARACTERS]}"
    return model, ""


def _prepare(model: LanguageModel, options: TrainerOptions) -> LanguageModel:
    model.recompute = options.recompute
    if options.weights == "bf16":
        model.keep_bf16()
    return model


def _try(model: LanguageModel, microbatch: int) -> None:
    """Make one pass and one backward pass, which compile both; nothing of them stays."""
    tokens = torch.zeros(microbatch, model.config.context, dtype=torch.int64, device=model.flat.device)
    model.attach_gradient()
    model(tokens, tokens).backward()
    model.clear_gradient()


def _cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "murmur" / "torch"

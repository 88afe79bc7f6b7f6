"""Build the model that a trainer trains, compiled where the volunteer asks for it and the machine can.

A machine that cannot compile trains all the same, at the speed of before; the trainer says so in one line.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import torch

from node.model import LanguageModel, build_compiled_model, build_layerwise_model, build_model, cut_of, has_compiler
from node.model.weight_files import read_frozen
from node.options import TrainerOptions
from node.trainer.devices.device import is_out_of_memory
from protocol.errors import DeviceError
from protocol.manifest.run import Manifest

CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
MAX_REASON_CHARACTERS: Final = 200


def build_trained_model(
    manifest: Manifest, device: torch.device, microbatch: int, options: TrainerOptions, base: Path
) -> tuple[LanguageModel, str]:
    """Build the model, or the stage, on `device`; return it, and why it is not compiled although it should be.

    Args:
        microbatch: sequences of one forward pass, for which the program is compiled.
        options: whether to compile the model, which a stage of a pipeline never is, and how to keep weights and
            activations.
        base: folder of the manifest, where the path of frozen weights starts.
    """
    frozen = read_frozen(manifest.model, base)
    plain = _prepare(build_model(manifest.model, device, cut_of(manifest), frozen), options)
    if not options.compile:
        return plain, ""
    if manifest.pipeline.is_cut:
        return plain, "a stage of a pipeline is not compiled"

    def build() -> LanguageModel:
        model = _prepare(build_compiled_model(manifest.model, device), options)
        if frozen is not None:
            model.hold_frozen(frozen)
        return model

    model, fault = _compile(device, microbatch, build)
    return model or plain, fault


def build_dealt_model(
    manifest: Manifest, device: torch.device, microbatch: int, options: TrainerOptions, vote: Callable[[float], float]
) -> tuple[LanguageModel, str]:
    """Build the model of one of several ranks, on the CPU; return it, and why it is not compiled although it should be.

    A model of one layer shows first whether this device can compile. All ranks compile, or none does.

    Args:
        device: of this rank, to which its part of the model will go.
        vote: adds up a number over all ranks.
    """
    if manifest.adapter is not None:
        raise DeviceError("an adapter trains on one device; leave out --devices, or name one")
    if not options.compile:
        return _prepare(build_model(manifest.model), options), ""
    one_layer = manifest.model.model_copy(update={"layers": 1})
    trial, fault = _compile(
        device, microbatch, lambda: _prepare(build_layerwise_model(one_layer, device, device), options)
    )
    del trial
    if not vote(float(bool(fault))):
        return _prepare(build_layerwise_model(manifest.model, device), options), ""
    return _prepare(build_model(manifest.model), options), fault or "another device of this peer cannot compile"


def _compile(
    device: torch.device, microbatch: int, build: Callable[[], LanguageModel]
) -> tuple[LanguageModel | None, str]:
    """Return a model that has computed on `device`, or why it cannot."""
    if device.type == "cpu" and not has_compiler():
        return None, "there is no C++ compiler (g++ or clang++)"
    os.environ.setdefault(CACHE_VARIABLE, str(_cache_directory()))
    model = build()
    try:
        _try(model, microbatch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON_CHARACTERS]}"
    return model, ""


def uncompiled(is_compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which a compiled model computes plainly, because batches of other shapes follow.

    A model that is not compiled does not need the compiler, which takes long to import.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def _prepare(model: LanguageModel, options: TrainerOptions) -> LanguageModel:
    model.recompute = options.recompute
    if options.weights == "bf16":
        model.keep_bf16()
    if options.fp8:
        model.multiply_in_fp8()
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

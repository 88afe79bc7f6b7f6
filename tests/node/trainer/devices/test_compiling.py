"""`--compile` where it works, and the one line of each reason why it does not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.model import build_model
from node.model.decoders.decoder import CompiledDecoder, LayerwiseDecoder
from node.options import TrainerOptions
from node.trainer.devices import compiling
from node.trainer.devices.compiling import build_dealt_model, build_trained_model
from node.trainer.devices.device import device_class
from tests.swarm.process_swarm import manifest_with

CPU = torch.device("cpu")
MANIFEST = manifest_with()


class Uncompilable(CompiledDecoder):
    def forward(self, inputs: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        raise RuntimeError("CppCompileError: C++ compile error\nlong output of a compiler " + "x" * 5000)


def test_without_the_option_the_model_is_plain() -> None:
    model, fault = build_trained_model(MANIFEST, CPU, 2, TrainerOptions(), Path())
    assert type(model) is type(build_model(MANIFEST.model)) and fault == ""


def test_machine_without_a_compiler_trains_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model, fault = build_trained_model(MANIFEST, CPU, 2, TrainerOptions(compile=True), Path())
    assert not isinstance(model, CompiledDecoder) and fault == "there is no C++ compiler (g++ or clang++)"


def test_compile_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: object, device: torch.device) -> CompiledDecoder:
        model = build_model(MANIFEST.model, device)
        model.__class__ = Uncompilable
        assert isinstance(model, CompiledDecoder)
        return model

    monkeypatch.setattr(compiling, "build_compiled_model", build)
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)
    model, fault = build_trained_model(MANIFEST, CPU, 2, TrainerOptions(compile=True), Path())
    assert not isinstance(model, CompiledDecoder)
    assert fault.startswith("RuntimeError: CppCompileError: C++ compile error long") and len(fault) < 250
    assert "\n" not in fault


def test_all_ranks_compile_or_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute otherwise would wait for one another in other places."""
    options = TrainerOptions(compile=True)
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)
    monkeypatch.setattr(compiling, "_try", lambda model, microbatch: None)
    model, fault = build_dealt_model(MANIFEST, CPU, 2, options, vote=lambda own: own)
    assert isinstance(model, LayerwiseDecoder) and fault == ""
    model, fault = build_dealt_model(MANIFEST, CPU, 2, options, vote=lambda own: own + 1)
    assert not isinstance(model, LayerwiseDecoder) and fault == "another device of this peer cannot compile"
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    model, fault = build_dealt_model(MANIFEST, CPU, 2, options, vote=lambda own: own)
    assert not isinstance(model, LayerwiseDecoder) and fault == "there is no C++ compiler (g++ or clang++)"
    model, fault = build_dealt_model(MANIFEST, CPU, 2, TrainerOptions(), vote=lambda own: 1 / 0)
    assert not isinstance(model, LayerwiseDecoder) and fault == "", "nobody votes without the option"


def test_memory_that_runs_out_is_not_a_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(model: object, microbatch: int) -> None:
        raise MemoryError

    monkeypatch.setattr(compiling, "_try", scarce)
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)
    with pytest.raises(MemoryError):
        build_trained_model(MANIFEST, CPU, 2, TrainerOptions(compile=True), Path())


def test_audits_never_mix_compiled_and_plain_steps() -> None:
    assert device_class(CPU, is_compiled=True) != device_class(CPU)

"""Which device is taken."""

from pathlib import Path

import pytest
import torch

from node.commands.capacity import estimate_needs
from node.model import shape_table
from node.options import NodeOptions, TrainerOptions
from node.trainer.devices import device
from node.trainer.devices.device import (
    autocast_context,
    choose_device,
    choose_devices,
    device_class,
    device_name,
    require_usable_device,
    uses_bf16,
)
from protocol.errors import DeviceError
from protocol.manifest.sections import MethodSection, PipelineSection
from tests.node.small_run import MANIFEST

DEEP = MANIFEST.model.model_copy(update={"tied": False, "layers": 2})


@pytest.mark.parametrize(("present", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch, present: bool, taken: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert choose_device("auto").type == taken
    assert choose_device("cpu").type == "cpu"


def test_a_missing_accelerator_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="use --device cpu"):
        choose_device("cuda")


def test_apple_silicon_trains_plain_runs_in_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="which Apple silicon has; use --device cpu"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    mps = choose_device("mps")
    assert (mps.type, device_name(mps), device_class(mps).split()[0], choose_device("auto").type) == ("mps",) * 3 + (
        "cpu",
    )
    assert not uses_bf16(mps)
    options = NodeOptions(manifest=MANIFEST, base=tmp_path, folder=tmp_path, device="mps")
    require_usable_device(options)
    stages = MANIFEST.model_copy(update={"model": DEEP, "pipeline": PipelineSection(stages=2, microbatch=1)})
    with pytest.raises(DeviceError, match="adds up in fp64, which mps lacks"):
        require_usable_device(options.model_copy(update={"manifest": stages}))


def test_the_memory_of_apple_silicon_has_both_copies_of_the_weights() -> None:
    numel = shape_table(MANIFEST.model).numel
    assert estimate_needs(MANIFEST, "mps").memory - estimate_needs(MANIFEST, "cuda").memory >= 24 * numel


def test_devices_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cards = tuple(torch.device(f"cuda:{number}") for number in (0, 1))
    assert choose_devices(TrainerOptions(device="cuda:1")) == cards[1:]
    assert choose_devices(TrainerOptions(device="all")) == cards
    assert choose_devices(TrainerOptions(devices=("cuda:1", "cuda:0"))) == cards[::-1]
    assert choose_devices(TrainerOptions()) == (torch.device("cuda"),)
    for missing in (TrainerOptions(device="cuda:2"), TrainerOptions(devices=("cuda:0", "cuda:2"))):
        with pytest.raises(DeviceError, match="there is no cuda:2 here; this machine has cuda:0, cuda:1"):
            choose_devices(missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="use --device cpu"):
        choose_devices(TrainerOptions(device="all"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": MethodSection(recipe="frugal", inner={"kind": "growing-batch"})}, "needs the whole gradient"),
        (
            {"pipeline": PipelineSection(stages=2, microbatch=1), "model": DEEP},
            "a stage of a pipeline trains on one",
        ),
    ],
)
def test_run_that_several_devices_cannot_train_is_refused(changes: dict[str, object], reason: str) -> None:
    """Control: one device trains it, and several devices train the run without the change."""
    for update, devices in ((changes, ("cpu",)), ({}, ("cpu", "cpu")), (changes, ("cpu", "cpu"))):
        manifest = MANIFEST.model_copy(update=update)
        settings = NodeOptions(manifest=manifest, base=Path(), folder=Path(), devices=devices)
        if update and len(devices) > 1:
            with pytest.raises(DeviceError, match=reason):
                require_usable_device(settings)
        else:
            require_usable_device(settings)


def test_devices_of_a_loop_that_chooses_its_own_are_refused() -> None:
    settings = NodeOptions(manifest=MANIFEST, base=Path(), folder=Path(), devices=("cpu", "cpu"), own_loop=True)
    with pytest.raises(DeviceError, match="your loop chooses its devices"):
        require_usable_device(settings)
    require_usable_device(settings.model_copy(update={"own_loop": False}))


def test_a_processor_computes_in_fp32() -> None:
    processor = torch.device("cpu")
    assert device_name(processor) == "cpu"
    with autocast_context(processor):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_model_larger_than_the_machine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: it is accepted by a machine that has the memory."""
    monkeypatch.setattr(device, "total_memory", lambda: 10**12)
    model = MANIFEST.model.model_copy(update={"width": 2**16, "layers": 1024, "hidden": 2**18})
    settings = NodeOptions(
        manifest=MANIFEST.model_copy(update={"model": model}), base=Path(), folder=Path(), device="cpu"
    )
    with pytest.raises(DeviceError, match=r"the model has .* needs at least .*, but this machine has 1.0 TB"):
        require_usable_device(settings)
    monkeypatch.setattr(device, "total_memory", lambda: 10**16)
    require_usable_device(settings)

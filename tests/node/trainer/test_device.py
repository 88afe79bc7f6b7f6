"""Which device is taken."""

from pathlib import Path

import pytest
import torch

from node.options import NodeOptions
from node.trainer import device
from node.trainer.device import autocast_context, choose_device, device_name, require_usable_device
from protocol.errors import DeviceError
from tests.node.small_run import MANIFEST


@pytest.mark.parametrize(("present", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch, present: bool, taken: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert choose_device("auto").type == taken
    assert choose_device("cpu").type == "cpu"


def test_a_missing_accelerator_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="use --device cpu"):
        choose_device("cuda")


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
    monkeypatch.setattr(device, "total_memory", lambda: 10**15)
    require_usable_device(settings)

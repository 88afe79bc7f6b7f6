"""Which device a trainer computes on."""

from contextlib import AbstractContextManager, nullcontext

import torch

from node.config import Device
from protocol.errors import DeviceError


def choose_device(wanted: Device) -> torch.device:
    """`auto` takes the accelerator where there is one. Raises DeviceError when `cuda` is asked for and missing."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise DeviceError("no CUDA device here; use --device cpu, or install the driver and a CUDA build of torch")
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """For people: the accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def precision(device: torch.device) -> AbstractContextManager[object]:
    """bf16 matrix products where the hardware is made for them; fp32 on a processor."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

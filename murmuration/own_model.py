"""A module of the user, whose parameters become views of one flat vector."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from node.model import ModelFamily, model_family, shapes_of
from node.model.shapes import ShapeTable
from node.trainer.live import FlatModel
from protocol.errors import UsageError
from protocol.manifest.run import Manifest

MAX_NAMED: Final = 5  # parameters in an error
WRAPPERS: Final = ("_orig_mod.", "module.")  # of torch.compile, and of DataParallel and its like


class OwnModel(FlatModel):
    """The parameters of a module, in the order of the run's shape table.

    Their values move into one flat vector; the module and its optimizer keep the parameter objects that they have.
    """

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        shapes, family = shapes_of(manifest), model_family(manifest.model)
        parameters = _in_order(unwrapped_parameters(module), shapes, family)
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise UsageError(f"the model is on {len(devices)} devices; move it to one of them before you join")
        self.flat = torch.empty(shapes.numel, device=devices.pop())
        for parameter, view in zip(parameters, shapes.views(self.flat).values(), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.module = module

    def load_flat(self, flat: Tensor) -> None:
        """Copy all weights from `flat` (numel,), fp32 on any device."""
        self.flat.copy_(flat)


def unwrapped_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without torch.compile and DistributedDataParallel."""
    parameters = dict(module.named_parameters())
    while prefix := next((each for each in WRAPPERS if parameters and _all_begin(parameters, each)), ""):
        parameters = {name.removeprefix(prefix): parameter for name, parameter in parameters.items()}
    return parameters


def _all_begin(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _in_order(parameters: Mapping[str, nn.Parameter], shapes: ShapeTable, family: ModelFamily) -> list[nn.Parameter]:
    """Return the parameters in the order of the table, by the run's names or by those of transformers.

    Raises UsageError, which names those that differ.
    """
    other = {name: family.hugging_face_name(name) for name in shapes.names}
    names = max(
        (dict(zip(shapes.names, shapes.names, strict=True)), other), key=lambda known: _matches(known, parameters)
    )
    faults = [f"{names[name]} is missing" for name in shapes.names if names[name] not in parameters]
    faults += [f"{name} is not in the run" for name in parameters if name not in names.values()]
    for name, shape in shapes.entries:
        found = parameters.get(names[name])
        if found is not None and tuple(found.shape) != shape:
            faults.append(f"{names[name]} has shape {tuple(found.shape)} instead of {shape}")
        elif found is not None and found.dtype != torch.float32:
            faults.append(_type_fault(names[name], found))
    if faults:
        raise UsageError(f"the model is not the run's: {_shorten(faults)}")
    return [parameters[names[name]] for name in shapes.names]


def require_fp32(parameters: Mapping[str, Tensor]) -> None:
    """Raise UsageError, which names the parameters of other types."""
    faults = [_type_fault(name, values) for name, values in parameters.items() if values.dtype != torch.float32]
    if faults:
        raise UsageError(f"the model cannot be exchanged: {_shorten(faults)}")


def _type_fault(name: str, values: Tensor) -> str:
    return f"{name} is {values.dtype} instead of float32 (use autocast for smaller types)"


def _matches(names: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(name in parameters for name in names.values())


def _shorten(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    return "; ".join(faults[:MAX_NAMED]) + more

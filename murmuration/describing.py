"""Describe a model of one's own for a run: names, shapes and first values, or its weights."""

from pathlib import Path
from typing import Final

from torch import Tensor, nn

from murmuration.own_model import require_fp32, unwrapped_parameters
from node.daemon.checkpoints.tensor_file import encode_tensors, write_file
from node.model.custom import to_text
from protocol.errors import StorageError, UsageError

WEIGHTS_SUFFIX: Final = ".safetensors"
NAMES_SUFFIX: Final = ".json"
READABLE: Final = 0o644
CONSTANT_NAMES: Final = {0.0: "zeros", 1.0: "ones"}


def describe(model: nn.Module, path: str | Path) -> None:
    """Write the file by which a run of `model.kind = "custom"` knows a model.

    Args:
        model: the module; its parameters are fp32.
        path: a new file. One that ends in .json gets names, shapes and for each parameter its constant value, or
            a normal distribution as wide as its values: write it into the manifest as `model.tensors`. One that ends in
            .safetensors gets the values themselves: write it as `model.from`.

    Raises:
        UsageError: The path ends in something else, or a parameter is not fp32.
        StorageError: The file exists, or cannot be written.
    """
    path = Path(path)
    parameters = {name: parameter.detach().cpu() for name, parameter in unwrapped_parameters(model).items()}
    require_fp32(parameters)
    if path.suffix not in (NAMES_SUFFIX, WEIGHTS_SUFFIX):
        raise UsageError(f"{path} ends in neither {NAMES_SUFFIX} (names) nor {WEIGHTS_SUFFIX} (weights); rename it")
    if path.suffix == WEIGHTS_SUFFIX:
        chunks = encode_tensors(parameters, {"format": "pt"})
    else:
        tensors = {name: (tuple(values.shape), _first_values(values)) for name, values in parameters.items()}
        chunks = iter([to_text(tensors).encode()])
    try:
        write_file(path, chunks, READABLE)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; name a new file") from error


def _first_values(values: Tensor) -> str:
    """Return the rule that draws values like these."""
    if values.numel() and bool((values == values.flatten()[0]).all()):
        constant = float(values.flatten()[0])
        return CONSTANT_NAMES.get(constant, f"constant {constant:.9g}")
    return f"normal {float(values.double().pow(2).mean().sqrt()):.6f}"

"""Payloads have the size that the manifest implies, and every stage decodes the same values from them."""

from typing import Any

import pytest
import torch

from node.trainer.ipc.activation_memory import SlotSizes
from node.trainer.stages.stage_pass import FORMATS
from optim.errors import CodecError
from protocol.manifest.sections import ACTIVATION_BYTES, PipelineSection


def test_there_is_a_format_for_each_word_of_the_manifest() -> None:
    assert FORMATS.keys() == ACTIVATION_BYTES.keys()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(2, 16, 64), (3, 5, 10), (1, 1, 8)])
def test_payload_has_the_size_of_the_manifest_and_its_values_the_shape(name: str, shape: tuple[int, int, int]) -> None:
    table: Any = {"stages": 2, "microbatch": shape[0], "activations": name}
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    payload = FORMATS[name].encode(values)
    assert payload.dtype == torch.uint8
    assert payload.shape == (PipelineSection.model_validate(table).activation_bytes(shape[1], shape[2]),)
    decoded = FORMATS[name].decode(payload, shape)
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded, values, rtol=0, atol=float(values.abs().max()) / 200)
    assert torch.equal(decoded, FORMATS[name].round_trip(values))


@pytest.mark.parametrize("name", FORMATS)
def test_output_that_is_not_finite_never_leaves(name: str) -> None:
    with pytest.raises(CodecError):
        FORMATS[name].encode(torch.tensor([1.0, float("nan")]))


def test_slots_of_odd_sizes_can_be_viewed_as_numbers() -> None:
    sizes = SlotSizes(activation_bytes=1034, activations=3, token_bytes=76, tokens=2)
    places = [sizes.place(slot) for slot in range(5)]
    assert not any(start % 8 for start, _ in places)
    assert all(start + size <= after for (start, size), (after, _) in zip(places, places[1:], strict=False))
    assert sum(places[-1]) <= sizes.total_bytes

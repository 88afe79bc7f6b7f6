"""Devices without bf16 train in fp32, and say so."""

import pytest
import torch

from node.model import build_compiled_model, build_model, initial_weights, products
from node.trainer.devices.device import autocast_context, describe_missing_bf16
from protocol.manifest.model import ModelSection

SHAPE = ModelSection(vocabulary=32, width=16, layers=1, heads=4, hidden=24, context=12)
CARD = torch.device("cuda", 1)


def test_old_card_trains_in_fp32_and_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {CARD: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    line = describe_missing_bf16(CARD)
    assert line.startswith("Tesla T4 has no bf16: training in fp32") and "\n" not in line
    assert not isinstance(autocast_context(CARD), torch.autocast)
    capability[CARD] = (8, 0)
    assert describe_missing_bf16(CARD) == "" and products.has_bf16(CARD)
    assert describe_missing_bf16(torch.device("cpu")) == ""


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "avx512_bf16"}])
def test_compiled_model_multiplies_in_bf16_only_where_the_processor_does(
    flags: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_cpu_flags", lambda: frozenset(flags))
    plain, compiled = build_model(SHAPE), build_compiled_model(SHAPE)
    tokens = torch.randint(SHAPE.vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    for model in (plain, compiled):
        model.load_flat(initial_weights(SHAPE, 0))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted, found = (model(tokens) for model in (plain, compiled))
    assert (found.dtype == torch.bfloat16) == ("avx512_bf16" in flags)
    torch.testing.assert_close(found.float(), wanted, atol=1e-5 if found.dtype == torch.float32 else 1e-2, rtol=0.05)

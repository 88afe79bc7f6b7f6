"""Llama decoders (arXiv 2302.13971)."""

from typing import Any

from node.model.config_keys import ConfigKeys
from node.model.decoders.family import DecoderFamily
from protocol.manifest.model import ModelSection


class LlamaFamily(DecoderFamily):
    """Llama decoders of any size."""

    kind = "llama"
    title = "Llama"
    config_keys = ConfigKeys("llama", "LlamaForCausalLM")

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Return the config.json of LlamaForCausalLM."""
        return super().hugging_face_config(config) | {"mlp_bias": False}

"""Course machinery. Llama, Mistral and Qwen2.5, dense: lesson 0's model without norms of queries and keys.

They differ in three settings: Qwen2.5's q, k and v have biases, and Llama's may; in Mistral 7B v0.1 every layer has a
window, in Qwen2.5 some may have one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic_core import core_schema as s
from torch import nn

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config_schema import (
    FLAG,
    LENGTHS,
    ROTATION,
    SETTINGS,
    SHAPE,
    WINDOW,
    check_model,
    check_types,
    layer_types,
    validator,
)
from mini_engine.families.family import Family
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.kinds import FULL, SLIDING
from mini_engine.model.qwen3 import Qwen3Attention
from mini_engine.model.rope import RotaryEmbedding
from mini_engine.windows.window_config import WindowConfig

LENGTH = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768}  # max_position_embeddings where the file has none
END_TOKEN = {"llama": 2, "mistral": 2}
CONFIG = validator(
    SHAPE, SETTINGS | LENGTHS | ROTATION | WINDOW | dict(mlp_bias=FLAG, sliding_window=s.int_schema(ge=2))
)


@dataclass(frozen=True)
class LlamaConfig(WindowConfig):
    """The shape of a dense Llama, Mistral or Qwen2.5. Fields have the names they have in config.json.

    attention_bias: q, k and v have biases. output_bias: o has one, too.
    """

    model_type: ClassVar[str] = "llama"

    output_bias: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        return read_llama(raw, path)


def read_llama(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json, by the names of LlamaConfig's fields.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    kind = raw.get("model_type")
    if kind not in LENGTH:
        raise UserError(f"{path} describes a model of type {shown(kind)}, not one of {', '.join(map(repr, LENGTH))}")
    given = {name: value for name, value in raw.items() if value is not None}
    usual = {"num_key_value_heads": given.get("num_attention_heads"), "max_position_embeddings": LENGTH[kind]}
    config = check_model(CONFIG, usual | given, path)
    if config.get("mlp_bias"):
        raise UserError(f"{path} has mlp_bias = true; this engine's feed-forward blocks have no biases")
    if "head_dim" not in config:
        config["head_dim"] = derived_head_dim(config, path)
    bias = kind == "qwen2" or (kind == "llama" and config.get("attention_bias", False))
    config |= {"attention_bias": bias, "output_bias": bias and kind == "llama"}
    config["layer_types"] = types_of(raw, kind, config["num_hidden_layers"])
    check_types(config["layer_types"], config, path)
    return config | {"eos_token_id": raw.get("eos_token_id", END_TOKEN.get(kind))}


def types_of(raw: Mapping[str, Any], kind: str, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer. A Mistral has windows in all layers, unless its window is null."""
    if kind == "qwen2":
        return tuple(layer_types(raw))
    slides = kind == "mistral" and raw.get("sliding_window", 0) is not None
    return (SLIDING if slides else FULL,) * num_layers


def derived_head_dim(config: Mapping[str, Any], path: Path) -> int:
    """Return the width of a head where the file does not name it: the hidden size over the number of query heads."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if size % heads or size // heads % 2:
        raise UserError(
            f"{path} has hidden_size = {size} and num_attention_heads = {heads}, which makes no even head_dim; set it"
        )
    return size // heads


def no_norm(size: int, eps: float) -> nn.Module:
    """Return a norm that leaves heads as they are."""
    return nn.Identity()


def llama_model(config: LlamaConfig) -> CausalLM:
    """Return the model of this shape, without weights."""
    attentions = (
        Qwen3Attention(config, layer, no_norm, config.output_bias) for layer in range(config.num_hidden_layers)
    )
    layers = (DecoderLayer(config, attention) for attention in attentions)
    return causal_lm(config, Decoder(config, RotaryEmbedding(config), layers))


FAMILY = Family(LlamaConfig.from_dir, llama_model)

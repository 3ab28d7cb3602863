"""Course machinery. Qwen3 with experts: lesson 0's model, with a mixture of experts in most of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic_core import core_schema as s
from torch import nn

from mini_engine.checkpoint.config_schema import FLAG, LENGTHS, ROTATION, SETTINGS, SHAPE, check_model, validator
from mini_engine.experts.config import ExpertSizes, read_experts
from mini_engine.experts.experts import Experts
from mini_engine.experts.fast import sparse_layers
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.experts.router import SoftmaxRouter
from mini_engine.families.family import SHARED, Family
from mini_engine.families.llama import derived_head_dim
from mini_engine.layers import native
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.fast_model import with_torch_layers
from mini_engine.layers.torch_layers import TorchModel
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.kinds import FULL, SLIDING
from mini_engine.model.qwen3 import Qwen3Attention
from mini_engine.model.rope import RotaryEmbedding
from mini_engine.windows.window_config import DEFAULT_WINDOW, WindowConfig

OWN = dict(
    use_sliding_window=FLAG,
    sliding_window=s.int_schema(ge=2),
    decoder_sparse_step=s.int_schema(ge=1),
    mlp_only_layers=s.list_schema(s.int_schema(ge=0)),
    norm_topk_prob=FLAG,
)
DEFAULTS = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
CONFIG = validator(SHAPE, SETTINGS | LENGTHS | ROTATION | OWN)


@dataclass(frozen=True)
class Qwen3MoeConfig(ExpertSizes, WindowConfig):
    """The shape of a Qwen3 with experts. Fields have the names they have in config.json.

    decoder_sparse_step: every so many layers there are experts, unless `mlp_only_layers` names the layer.
    norm_topk_prob: the weights of a token's experts add up to 1.
    """

    model_type: ClassVar[str] = "qwen3_moe"

    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = False

    def is_sparse(self, layer: int) -> bool:
        """Return True if this layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        config = check_model(CONFIG, raw, path) | read_experts(raw, path, **DEFAULTS)
        if "head_dim" not in config:
            config["head_dim"] = derived_head_dim(config, path)
        slides = config.get("use_sliding_window") and raw.get("sliding_window", DEFAULT_WINDOW) is not None
        config["layer_types"] = (SLIDING if slides else FULL,) * config["num_hidden_layers"]
        return config | {"mlp_only_layers": tuple(config.get("mlp_only_layers", ()))}


def qwen3_moe_model(config: Qwen3MoeConfig) -> CausalLM:
    """Return the model of this shape, without weights."""
    layers = (
        DecoderLayer(config, Qwen3Attention(config, i), mlp=experts_of(config) if config.is_sparse(i) else None)
        for i in range(config.num_hidden_layers)
    )
    return causal_lm(config, Decoder(config, RotaryEmbedding(config), layers))


def experts_of(config: Qwen3MoeConfig) -> nn.Module:
    """Return a feed-forward block with experts."""
    hidden = config.hidden_size
    router = SoftmaxRouter(config.routed_experts, config.num_experts_per_tok, hidden, config.norm_topk_prob)
    return SparseFeedForward(router, Experts(config.num_experts, hidden, config.moe_intermediate_size))


def qwen3_moe_decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> TorchModel:
    """Return the decoder with fast layers."""
    layer, finish = sparse_layers(functions)
    return with_torch_layers(model, functions, exchange, layer=layer, finish=finish)


FAMILY = Family(Qwen3MoeConfig.from_dir, qwen3_moe_model, qwen3_moe_decoder, shared=(*SHARED, "num_experts"))

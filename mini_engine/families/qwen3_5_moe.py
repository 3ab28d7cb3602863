"""Course machinery. Qwen3.5 with experts: lesson 11's hybrid, with a mixture of experts in every layer.

Every token passes one more expert, the shared one, whose result a gate scales. Of a model with a vision tower, the text
part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from mini_engine.checkpoint.config_schema import WIDTH, check, validator
from mini_engine.experts.config import ExpertSizes, read_experts
from mini_engine.experts.experts import Experts
from mini_engine.experts.fast import sparse_layers
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.experts.router import SoftmaxRouter
from mini_engine.families.qwen3_5 import FAMILY as DENSE
from mini_engine.hybrid.fast import hybrid_decoder
from mini_engine.hybrid.hybrid_config import HybridConfig, read_hybrid, text_settings
from mini_engine.hybrid.model import hybrid_model, swiglu
from mini_engine.layers import native
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.torch_layers import TorchModel
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.layers import Linear

SHARED_EXPERT = validator({}, dict(shared_expert_intermediate_size=WIDTH))
DEFAULTS = dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512)


@dataclass(frozen=True)
class HybridMoeConfig(ExpertSizes, HybridConfig):
    """The shape of a hybrid with experts. `intermediate_size` is that of the shared expert."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        text = text_settings(raw, path)
        size = check(SHARED_EXPERT, text, path).get("shared_expert_intermediate_size", 512)
        return read_hybrid({**text, "intermediate_size": size}, path) | read_experts(text, path, **DEFAULTS)


def experts_of(config: HybridMoeConfig) -> nn.Module:
    """Return the feed-forward block of a layer."""
    hidden = config.hidden_size
    return SparseFeedForward(
        SoftmaxRouter(config.routed_experts, config.num_experts_per_tok, hidden, normalize=True),
        Experts(config.num_experts, hidden, config.moe_intermediate_size),
        swiglu(config),
        Linear(hidden, 1, bias=False),
    )


def decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> TorchModel:
    """Return the decoder with fast layers."""
    return hybrid_decoder(model, functions, exchange, *sparse_layers(functions))


FAMILY = DENSE._replace(
    shape=HybridMoeConfig.from_dir,
    build=partial(hybrid_model, mlp=experts_of),
    decoder=decoder,
    shared=(*DENSE.shared, "num_experts"),
)

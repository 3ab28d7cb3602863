"""Lesson 16. What config.json may say of DeepSeek-V2, DeepSeek-V3 and Youtu: families with the same attention.

They differ in defaults, and DeepSeek-V2 always rotates neighbours as pairs. Conversions of Youtu call themselves
"youtu_llm".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config_schema import FLAG, LENGTHS, ROTATION, SETTINGS, SHAPE, check_model, validator
from mini_engine.experts.config import ExpertSizes
from mini_engine.families.deepseek_experts import SCHEMAS, read_experts
from mini_engine.latents.latent_config import LatentConfig

PART = s.int_schema(ge=1, le=2**16)  # a head's dimension, or a rank
PAIRS = s.int_schema(ge=2, le=2**16, multiple_of=2)  # RoPE rotates pairs
LATENTS = dict(
    kv_lora_rank=PART,
    q_lora_rank=PART,
    qk_nope_head_dim=PART,
    qk_rope_head_dim=PAIRS,
    v_head_dim=PART,
    rope_interleave=FLAG,
    mlp_bias=FLAG,
    first_k_dense_replace=s.int_schema(ge=0),
)
REQUIRED = {name: schema for name, schema in SHAPE.items() if name != "num_key_value_heads"}
OPTIONAL = {name: schema for name, schema in SETTINGS.items() if name not in ("head_dim", "layer_types")}
CONFIG = validator(REQUIRED, OPTIONAL | LENGTHS | ROTATION | LATENTS | dict(num_key_value_heads=PART))
SIZES = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
YOUTU: dict[str, Any] = dict(max_position_embeddings=131_072, eos_token_id=128_001, tie_word_embeddings=True)
DEFAULTS: dict[str, dict[str, Any]] = {  # transformers' values for settings that the file lacks
    "deepseek_v2": dict(max_position_embeddings=2048, eos_token_id=2, first_k_dense_replace=0),
    "deepseek_v3": dict(max_position_embeddings=4096, eos_token_id=1, first_k_dense_replace=3),
    "youtu": YOUTU,
    "youtu_llm": YOUTU,
}


@dataclass(frozen=True)
class DeepseekConfig(ExpertSizes, LatentConfig):
    """The shape of one of these models. Fields have the names they have in config.json; of experts there may be none.

    first_k_dense_replace: the layers from this one on have experts.
    shared_size: of the expert that every token passes, in columns: `n_shared_experts` of them side by side.
    scoring_func: "softmax" or "sigmoid", of the router's logits.
    n_group, topk_group: the groups of experts, and how many of them are open to a token.
    norm_topk_prob: the weights of a token's experts add up to 1, before they are multiplied by routed_scaling_factor.
    """

    num_experts: int = 0
    routed_experts: int = 0
    first_k_dense_replace: int = 0
    shared_size: int = 0
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        return read_deepseek(raw, path)


def read_deepseek(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json, by the names of DeepseekConfig's fields.

    Raises:
        UserError: a setting is missing or impossible, or the model is quantized or of another family.
    """
    kind = raw.get("model_type")
    if kind not in DEFAULTS:
        raise UserError(
            f"{path} describes a model of type {shown(kind)}; of the models with latents, this engine runs "
            f"{', '.join(map(repr, DEFAULTS))}"
        )
    config = SIZES | DEFAULTS[kind] | check_model(CONFIG, raw, path)
    config["eos_token_id"] = raw.get("eos_token_id", DEFAULTS[kind]["eos_token_id"])
    config["rope_interleave"] = kind == "deepseek_v2" or bool(raw.get("rope_interleave", True))
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        config["q_lora_rank"] = None
    check_heads(config, path)
    check_sharpening(config, path)
    if config.get("mlp_bias") and kind == "deepseek_v2":  # in the others, transformers has no such bias either
        raise UserError(f"{path} has mlp_bias = true; this engine's feed-forward blocks have no biases")
    is_dense = kind not in SCHEMAS or raw.get("n_routed_experts", 0) is None  # null: DeepSeek's own code has none then
    if not is_dense and config["first_k_dense_replace"] < config["num_hidden_layers"]:
        config |= read_experts(kind, raw, path)
    return config | {"head_dim": config["qk_rope_head_dim"]}


def check_heads(config: dict[str, Any], path: Path) -> None:
    """Refuse fewer key heads than query heads; if there is no number of them, set it."""
    heads = config["num_attention_heads"]
    if config.setdefault("num_key_value_heads", heads) != heads:
        raise UserError(
            f"{path} has num_key_value_heads = {config['num_key_value_heads']} for {heads} heads; from a latent every "
            "head gets its own key, so both numbers must be equal"
        )


def check_sharpening(config: Mapping[str, Any], path: Path) -> None:
    """Refuse `mscale_all_dim` without "yarn": transformers then sharpens attention too, by a factor of another type."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("mscale_all_dim") and kind not in ("default", "yarn"):
        raise UserError(f"{path} has mscale_all_dim with RoPE of type {shown(kind)}; latents need 'yarn' for that")

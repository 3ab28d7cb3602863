"""Lesson 16. The schema of a DeepSeek-V3's config.json. Validator and common settings are lesson 0's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config_schema import FLAG, LENGTHS, ROTATION, SETTINGS, SHAPE, check_model, validator

PART = s.int_schema(ge=1, le=2**16)  # a head's dimension, or a rank
PAIRS = s.int_schema(ge=2, le=2**16, multiple_of=2)  # RoPE rotates pairs
LATENTS = dict(
    kv_lora_rank=PART,
    q_lora_rank=PART,
    qk_nope_head_dim=PART,
    qk_rope_head_dim=PAIRS,
    v_head_dim=PART,
    rope_interleave=FLAG,
    first_k_dense_replace=s.int_schema(ge=0),
)
REQUIRED = {name: schema for name, schema in SHAPE.items() if name != "num_key_value_heads"}
OPTIONAL = {name: schema for name, schema in SETTINGS.items() if name not in ("head_dim", "layer_types")}
CONFIG = validator(REQUIRED, OPTIONAL | LENGTHS | ROTATION | LATENTS | dict(num_key_value_heads=PART))
DEFAULTS = dict(  # transformers' values for settings that the file lacks
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=3,
    max_position_embeddings=4096,
)
END_TOKEN = 1  # the default


def read_latents(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json, by the names of LatentConfig's fields.

    Raises:
        UserError: the model has experts, is quantized or of another family, or a setting is missing or impossible.
    """
    if raw.get("model_type") != "deepseek_v3":
        raise UserError(
            f"{path} describes a model of type {shown(raw.get('model_type'))}; of the models with latents, lesson 16 "
            "runs 'deepseek_v3' with dense layers"
        )
    config = DEFAULTS | check_model(CONFIG, raw, path)
    config["eos_token_id"] = raw.get("eos_token_id", END_TOKEN)
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        config["q_lora_rank"] = None
    layers, dense, heads = config["num_hidden_layers"], config["first_k_dense_replace"], config["num_attention_heads"]
    if dense < layers:
        raise UserError(
            f"{path} has experts from layer {dense} of {layers} on (first_k_dense_replace); lesson 16 runs only models "
            "whose layers are all dense"
        )
    if config.setdefault("num_key_value_heads", heads) != heads:
        raise UserError(
            f"{path} has num_key_value_heads = {config['num_key_value_heads']} for {heads} heads; from a latent every "
            "head gets its own key, so both numbers must be equal"
        )
    _check_sharpening(config, path)
    return config | {"head_dim": config["qk_rope_head_dim"]}


def _check_sharpening(config: Mapping[str, Any], path: Path) -> None:
    """Refuse `mscale_all_dim` without "yarn": transformers then sharpens attention too, by a factor of another type."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("mscale_all_dim") and kind not in ("default", "yarn"):
        raise UserError(f"{path} has mscale_all_dim with RoPE of type {shown(kind)}; lesson 16 needs 'yarn' for that")

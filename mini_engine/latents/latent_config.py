"""Lesson 16. The shape of a DeepSeek-V3 whose layers are all dense: the sizes of latents, queries, keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.config_schema import FLAG, LENGTHS, ROTATION, SETTINGS, SHAPE, check_model, validator
from mini_engine.model.kinds import Kind, Latent

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


@dataclass(frozen=True)
class LatentConfig(Qwen3Config):
    """The shape of a dense model with latents. Fields have the names they have in config.json.

    kv_lora_rank: the size of a token's latent, from which keys and values of all heads are computed.
    qk_nope_head_dim, qk_rope_head_dim: the sizes of a head's query and key without position, and with RoPE. A key's
        RoPE part is shared by all heads; `head_dim` equals its size, since that is what RoPE rotates.
    v_head_dim: the size of a head's value.
    q_lora_rank: the size of the vector from which queries are computed; None: directly from the hidden state.
    rope_interleave: RoPE rotates the pairs (0, 1), (2, 3), … instead of (i, i + D/2).
    """

    model_type: ClassVar[str] = "deepseek_v3"
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer: all keep latents."""
        return (Latent(self.kv_lora_rank, self.qk_rope_head_dim),) * self.num_hidden_layers

    @property
    def qk_head_dim(self) -> int:
        """The size of a head's query, and of its expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def k_shape(self) -> tuple[int, int]:
        """The shape of a token's row in the pool's K: its latent."""
        return 1, self.kv_lora_rank

    @property
    def v_shape(self) -> tuple[int, int]:
        """The shape of a token's row in the pool's V: its rotary key."""
        return 1, self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """The softmax scale. YaRN sharpens attention here, not only in the angles (arXiv:2309.00071)."""
        mscale = self.rope_scaling.mscale_all_dim
        sharp = self.rope_scaling.sharpness(mscale) if mscale else 1.0
        return self.qk_head_dim**-0.5 * sharp * sharp

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`. UserError also for a model with experts."""
        return read_latents(raw, path)


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

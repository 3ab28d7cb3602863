"""Lesson 16. The shape of a model that keeps latents: the sizes of latents, queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.model.kinds import Kind, Latent


@dataclass(frozen=True)
class LatentConfig(Qwen3Config):
    """The shape of a model with latents. Fields have the names they have in config.json.

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

"""Lesson 16. The shape of a DeepSeek-V3 whose layers are all dense: what its latents hold, and what they become."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mini_engine.checkpoint.config import Qwen3Config, fields_of, read_settings


@dataclass(frozen=True)
class LatentConfig(Qwen3Config):
    """The shape of a dense model with latents. Fields have the names they have in config.json.

    kv_lora_rank: numbers in a token's latent, from which keys and values of all heads are made.
    qk_nope_head_dim, qk_rope_head_dim: numbers of a head's query and key without position, and with RoPE. The part with
        RoPE of a key is one for all heads; `head_dim` is its size too, since that is what RoPE rotates.
    v_head_dim: numbers of a head's value.
    q_lora_rank: numbers that queries are made of; None: of the hidden state itself.
    rope_interleave: RoPE rotates the pairs (0, 1), (2, 3), … instead of (i, i + D/2).
    """

    has_latents: ClassVar[bool] = True

    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    @property
    def qk_head_dim(self) -> int:
        """Numbers in a head's query, and in the key that is made for it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def k_shape(self) -> tuple[int, int]:
        """What the pool's K holds of a token: its latent."""
        return 1, self.kv_lora_rank

    @property
    def v_shape(self) -> tuple[int, int]:
        """What the pool's V holds of a token: its rotary key."""
        return 1, self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Softmax scale. YaRN sharpens attention here, not only in the angles (arXiv:2309.00071)."""
        mscale = self.rope_scaling.mscale_all_dim
        sharp = self.rope_scaling.sharpness(mscale) if mscale else 1.0
        return self.qk_head_dim**-0.5 * sharp * sharp

    @classmethod
    def from_dir(cls, directory: Path) -> "LatentConfig":
        """Read config.json of a checkpoint directory, and what generation_config.json adds if it exists.

        Raises:
            UserError: it has experts, is of another family, or a value is missing or impossible.
        """
        from mini_engine.latents.schema import read_latents  # its library is needed only here

        return cls(**fields_of(cls, read_settings(directory, read_latents)))

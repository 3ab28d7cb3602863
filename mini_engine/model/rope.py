"""Lesson 0. RoPE: a token's position as rotations of each head, and the scalings that stretch it to longer contexts.

Pair i of a head turns by `position * inv_freq[i]`: the first pairs turn quickly and tell neighbours apart, the last
ones turn once in thousands of tokens. A scaling slows pairs down, so that positions beyond the training context turn no
further than those that the model has seen. Each formula has the same order of operations as Hugging Face's, so the bits
are the same.
"""

import math

import torch
from torch import Tensor, nn

from mini_engine.checkpoint.config import Qwen3Config


class RotaryEmbedding(nn.Module):
    """The angles of every position (Su et al., 2021, arXiv:2104.09864).

    inv_freq: `[D/2]` float32, radians per position for each pair of a head.
    scale: multiplies cosine and sine; not 1 only for "yarn".
    """

    inv_freq: Tensor

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)
        self.scale = attention_factor(config)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of every position's angles.

        Args:
            positions: `[T]` int64, the index of each token in its own sequence.
            dtype: dtype of the result; the angles themselves are float32.

        Returns:
            cos and sin, each `[T, D]`: the D/2 angles twice, as rotate-half needs them.
        """
        angles = positions[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the token's angles. x `[T, H, D]`; cos and sin `[T, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def inverse_frequencies(config: Qwen3Config) -> Tensor:
    """Return `[D/2]` float32 on the CPU: the radians that each pair turns per position, with `config`'s scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    periods = config.rope_theta**exponents  # positions per radian
    scaling = config.rope_scaling
    if scaling.rope_type == "linear":
        return 1.0 / periods / scaling.factor
    if scaling.rope_type == "llama3":
        return llama3(1.0 / periods, config)
    if scaling.rope_type == "yarn":
        return yarn(periods, config)
    return 1.0 / periods  # "default"; also "dynamic", which changes nothing within max_model_len


def llama3(inv_freq: Tensor, config: Qwen3Config) -> Tensor:
    """Slow down by `factor` the pairs whose wavelength is long, leave the short ones, and blend in between.

    The scaling of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783).
    """
    s = config.rope_scaling
    length, low, high = config.trained_length, s.low_freq_factor, s.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    slowed = torch.where(wavelength > length / low, inv_freq / s.factor, inv_freq)
    keep = (length / wavelength - low) / (high - low)
    blended = (1 - keep) * slowed / s.factor + keep * slowed
    between = ~(wavelength < length / high) * ~(wavelength > length / low)
    return torch.where(between, blended, slowed)


def yarn(periods: Tensor, config: Qwen3Config) -> Tensor:
    """Slow down by `factor` the pairs that turn less than `beta_slow` times within the training context.

    Those that turn more than `beta_fast` times keep their speed; in between the two are blended (Peng et al., 2023,
    arXiv:2309.00071). periods: `[D/2]`, positions per radian.
    """
    s, dim = config.rope_scaling, config.head_dim

    def pair_that_turns(times: float) -> float:
        full_turns = math.log(config.trained_length / (times * 2 * math.pi))
        return dim * full_turns / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (s.factor * periods) * (1 - keep) + 1.0 / periods * keep


def attention_factor(config: Qwen3Config) -> float:
    """Return the factor of cosine and sine: with "yarn" attention is sharpened as the context grows, otherwise 1."""
    s = config.rope_scaling
    if s.rope_type != "yarn":
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return s.sharpness(s.mscale) / s.sharpness(s.mscale_all_dim)
    return s.sharpness(1.0)

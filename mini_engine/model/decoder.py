"""Lesson 0. The decoder of every model: an embedding, layers of a mixer and a feed-forward block, and the last norm.

A mixer is the part of a layer in which a token sees others; in lesson 0 it is attention. Tokens are packed, `[T]`, and
`meta.positions` has each token's position. Module names are the checkpoint's, so the name of a tensor says where it
belongs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.model.layers import Embedding, RMSNorm, SwiGLU

Norm = Callable[[int, float], nn.Module]  # makes a norm of a size, with an eps


class DecoderLayer(nn.Module):
    """A mixer, then feed-forward; each reads a normalized copy of x, and its result is added to x.

    Args:
        mixer: called with x, the positions' cosine and sine, the store and its plan. name: of the mixer in checkpoints.
        mlp: the feed-forward block; None: SwiGLU.
    """

    def __init__(
        self,
        config: Any,
        mixer: nn.Module,
        name: str = "self_attn",
        norm: Norm = RMSNorm,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, mixer)
        self.mlp: Any = mlp or SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm: Any = norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm: Any = norm(config.hidden_size, config.rms_norm_eps)

    @property
    def mixer(self) -> Any:
        """The mixer, whatever its name in checkpoints."""
        return getattr(self, self.name)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x), cos, sin, kv, meta)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, decoder layers and the final norm.

    Args:
        rope: returns cosine and sine of the angles at some positions. scale: multiplies the embeddings.
    """

    def __init__(
        self, config: Any, rope: nn.Module, layers: Iterable[nn.Module], norm: Norm = RMSNorm, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.rope, self.scale = rope, scale
        self.embed_tokens: nn.Module = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Return the normed hidden states `[R, hidden_size]` of `rows`, or of all tokens."""
        x = scaled(self.embed_tokens(token_ids), self.scale)
        cos, sin = self.rope(meta.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, kv, meta)
        x = self.norm(x)
        return x if rows is None else x[rows]


def scaled(x: Tensor, scale: float) -> Tensor:
    """Return x times the scale, which is rounded to x's dtype first, as in Hugging Face's code.

    It is rounded on the host: a copy to a GPU could not be recorded, and would cost each step a wait.
    """
    return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device="cpu").item()

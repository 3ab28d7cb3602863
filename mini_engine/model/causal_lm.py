"""Lesson 0. A language model: a decoder and its vocabulary head. The engine sees its config, dtype and device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.model.layers import Linear


class CausalLM(nn.Module):
    """A language model. Calling it runs one packed step.

    Args:
        config: its shape. model: the decoder, which maps token ids to normed hidden rows, with the last norm as `norm`.
        lm_head: maps hidden rows to logits; None: the embedding matrix is also the head.
    """

    def __init__(self, config: Any, model: nn.Module, lm_head: nn.Module | None) -> None:
        super().__init__()
        self.config = config
        self.model: Any = model
        self.lm_head: Any = lm_head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and logits."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights; the tensors of a plan must be on it too."""
        return self.model.norm.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The matrix `[vocab_size, hidden_size]` that turns hidden states into logits."""
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight

    def forward(self, token_ids: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step.

        Args:
            token_ids: `[T]` int64.
            kv: the store that takes this step's K and V and computes attention.
            meta: the step's plan, such as lesson 3's ForwardMeta; the model reads `positions` `[T]` and `slot_mapping`,
                the store the rest.
            rows: `[R]` int64, indices of the fed tokens whose logits are needed; None means all.

        Returns:
            logits `[R, vocab_size]` in the model's dtype.
        """
        hidden = self.model(token_ids, kv, meta, rows)
        return F.linear(hidden, self.head_weight) if self.lm_head is None else self.lm_head(hidden)


def causal_lm(config: Any, model: nn.Module) -> CausalLM:
    """Return a model with this decoder; a tied checkpoint uses the embedding matrix as its head."""
    tied = config.tie_word_embeddings
    return CausalLM(config, model, None if tied else Linear(config.hidden_size, config.vocab_size, bias=False))

"""Lesson 18. The layers of a rank: those of the other lessons, with sums completed over all ranks.

After matrices that are cut by rows, partial sums are added up over all ranks; `vocabulary.py` completes embedding and
head.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.layers.exchange import Exchange, Summed
from mini_engine.model.causal_lm import CausalLM
from mini_engine.ranks.collectives import Collectives
from mini_engine.ranks.shard import BY_ROWS
from mini_engine.ranks.vocabulary import CutEmbedding, GatheredHead


class CompletedModel(CausalLM):
    """A rank's model with the layers of lesson 0, 11 or 16.

    Args:
        model: this rank's part. head: turns hidden rows into logits.
    """

    def __init__(self, model: CausalLM, head: nn.Module) -> None:
        super().__init__(model.config, model.model)
        self.head = head

    def forward(self, token_ids: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step; return logits `[R, vocab_size]` of `rows` `[R]`, or of all fed tokens."""
        hidden = self.model(token_ids, kv, meta)
        return self.head(hidden if rows is None else hidden[rows])


def with_layers(model: Any, backend: str, collectives: Collectives) -> Any:
    """Return a rank's model with the layers of this backend. It takes over the weights of `model`.

    Every rank must use the same backend: one that added up at other points would wait for the others forever.

    Args:
        model: a rank's share, as loaded with `RankCut`.

    Raises:
        UserError: the backend does not work here.
    """
    embedding = partial(CutEmbedding, vocab_size=model.config.vocab_size, collectives=collectives)
    gathered = partial(GatheredHead, vocab_size=model.config.vocab_size, collectives=collectives)
    if backend == "reference":
        weight = model.head_weight
        with_sums(model, collectives).model.embed_tokens = embedding(model.model.embed_tokens)
        return CompletedModel(model, gathered(lambda hidden: F.linear(hidden, weight)))
    if model.config.has_states:
        from mini_engine.hybrid.fast import FastHybridForCausalLM, speed_up_hybrid

        fast = speed_up_hybrid(model, backend, collectives)
        fast.model.embed_tokens = embedding(fast.model.embed_tokens)
        return FastHybridForCausalLM(fast, gathered(fast.head), fast.native_step)
    if model.config.has_latents:
        from mini_engine.latents.fast import FastLatentForCausalLM, speed_up_latents

        fast = speed_up_latents(model, backend, collectives)
        return FastLatentForCausalLM(fast, embedding(fast.embed), gathered(fast.head))
    from mini_engine.layers.fast_model import FastQwen3ForCausalLM, speed_up

    fast = speed_up(model, backend, collectives)
    return FastQwen3ForCausalLM(fast.config, fast.model, embedding(fast.embed), gathered(fast.head))


def with_sums(model: Any, exchange: Exchange) -> Any:
    """Return the model with the sums of its row-cut matrices completed by `exchange`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in BY_ROWS:
                setattr(module, name, Summed(child, exchange))
    return model

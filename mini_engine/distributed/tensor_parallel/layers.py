"""Lesson 18. The layers of a rank: those of the other lessons, with sums completed over all ranks.

After matrices that are cut by rows, partial sums are added up over all ranks; `vocabulary.py` completes embedding and
head.
"""

from typing import Any

import torch.nn.functional as F

from mini_engine.distributed.tensor_parallel.collectives import Collectives
from mini_engine.distributed.tensor_parallel.shard import BY_ROWS
from mini_engine.distributed.tensor_parallel.vocabulary import CutEmbedding, GatheredHead
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.families import family_named
from mini_engine.layers.exchange import Exchange, Summed
from mini_engine.layers.fast_model import speed_up


def with_layers(model: Any, backend: str, collectives: Collectives) -> Any:
    """Return a rank's model with the layers of this backend. It takes over the weights of `model`.

    Every rank must use the same backend: one that added up at other points would wait for the others forever.

    Args:
        model: a rank's share, as loaded with `RankCut`.

    Raises:
        UserError: the backend does not work here.
    """
    vocab_size = model.config.vocab_size
    if backend == "reference":
        weight = model.head_weight
        fast, head = with_sums(model, collectives), lambda hidden: F.linear(hidden, weight)
    else:
        fast = speed_up(model, backend, collectives, family_named(model.config.model_type).decoder)
        head = fast.lm_head
    fast.model.embed_tokens = CutEmbedding(fast.model.embed_tokens, vocab_size, collectives)
    fast.lm_head = GatheredHead(head, vocab_size, collectives)
    return fast


def with_sums(model: Any, exchange: Exchange) -> Any:
    """Return the model with the sums of its row-cut matrices, and of experts, completed by `exchange`."""
    for name, child in list(model.named_children()):
        if name in BY_ROWS or isinstance(child, SparseFeedForward):
            setattr(model, name, Summed(child, exchange))
        else:
            with_sums(child, exchange)
    return model

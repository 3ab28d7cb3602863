"""Lesson 18. Embedding and vocabulary head cut by rows: each rank looks up its own tokens, and computes their logits.

A vector that one rank has looked up is added to the zeros of the others, in one all-reduce a step. Logits are gathered
in rank 0, the only one that samples. With V tokens and n ranks each has ceil(V / n) rows; the last rows are zero
padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mini_engine.distributed.tensor_parallel.collectives import Collectives

VOCABULARY = ("embed_tokens", "lm_head")


def rows_each(vocab_size: int, num_ranks: int) -> int:
    """Return the number of rows of embedding and head in every rank, padding included: ceil(V / n)."""
    return -(-vocab_size // num_ranks)


def rows_of(vocab_size: int, rank: int, num_ranks: int) -> range:
    """Return the token ids whose rows a rank holds. The last ranks may hold fewer than the others, or none."""
    each = rows_each(vocab_size, num_ranks)
    return range(vocab_size)[rank * each : (rank + 1) * each]


def looked_up(lookup: Callable[[Tensor], Tensor], token_ids: Tensor, rows: range) -> Tensor:
    """Return this rank's part of the embedded tokens, `[T, hidden_size]`: zeros for the tokens of other ranks.

    Args:
        lookup: returns the given rows of this rank's matrix, counted from its first. token_ids: `[T]` int64, of the
            whole vocabulary. rows: the ids whose rows this rank has.
    """
    is_mine = (token_ids >= rows.start) & (token_ids < rows.stop)
    vectors = lookup(torch.where(is_mine, token_ids - rows.start, 0))
    return vectors.masked_fill(~is_mine[:, None], 0)


def without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits `[R, vocab_size]` from gathered ones, `[R, n * ceil(V / n)]`.

    A padded row's logit is 0, which may be the largest of all, but its id is not a token.
    """
    return logits[:, :vocab_size]


class CutEmbedding(nn.Module):
    """An embedding whose rows are divided among the ranks.

    Args:
        lookup: returns rows `[T]` int64 of this rank's matrix as `[T, hidden_size]`.
    """

    def __init__(self, lookup: Callable[[Tensor], Tensor], vocab_size: int, collectives: Collectives) -> None:
        super().__init__()
        self.lookup, self.collectives = lookup, collectives
        self.rows = rows_of(vocab_size, collectives.rank, collectives.num_ranks)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map token_ids `[T]` int64 to `[T, hidden_size]`, the same in all ranks."""
        return self.collectives.all_reduce(looked_up(self.lookup, token_ids, self.rows))


class GatheredHead(nn.Module):
    """A vocabulary head whose rows are divided among the ranks.

    Args:
        head: computes the logits of this rank's rows.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, collectives: Collectives) -> None:
        super().__init__()
        self.head, self.vocab_size, self.collectives = head, vocab_size, collectives

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden `[R, hidden_size]` to logits `[R, vocab_size]` in rank 0; other ranks' results are unused."""
        return without_padding(self.collectives.gather(self.head(hidden)), self.vocab_size)

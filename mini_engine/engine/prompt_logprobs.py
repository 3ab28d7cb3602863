"""Lesson 5. Log probabilities of a prompt's own tokens: how likely the model finds text that it did not write.

Token i of a prompt is scored by the logits of position i - 1. Usually only the last position's logits are computed; a
request that asks for them gets every position's, and nothing from the prefix cache, which keeps no logits.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mini_engine.engine.sampler import scored
from mini_engine.engine.scheduler import Chunk

if TYPE_CHECKING:
    from mini_engine.engine.request import Request


def take_prompt_rows(logits: Tensor, chunks: Sequence[Chunk], fail: Callable[["Request", Exception], None]) -> Tensor:
    """Record the prompts' log probabilities. Returns the rows left for the sampler: see `Decoding.sample_rows`.

    Args:
        logits: `[R, vocab_size]`, the last `num_logits` of each chunk.
        fail: ends a request whose prompt cannot be recorded.
    """
    sampling, at = [], 0
    for chunk in chunks:
        count = chunk.num_logits
        sampling += range(at + count - chunk.num_samples, at + count)
        if chunk.request.needs_prompt_logprobs:
            try:
                record(chunk.request, chunk.start, logits[at : at + count])
            except Exception as error:
                fail(chunk.request, error)
        at += count
    return logits[sampling]


def record(request: "Request", start: int, logits: Tensor) -> None:
    """Append the tokens not yet recorded. Row i of logits `[T, vocab_size]` scores the prompt's token start + i + 1."""
    skipped = len(request.prompt_logprobs) - start  # a preempted request computes a prefix again
    ids = request.prompt_ids[len(request.prompt_logprobs) + 1 : start + len(logits) + 1]
    if ids:
        rows = logits[skipped : skipped + len(ids)]
        request.prompt_logprobs += scored(rows, ids, request.params.prompt_logprobs or 0)

"""Lesson 4. The sampler's result for one row: the token it chose and, where asked for, how likely it was.

Numbers only: a request keeps these and the scheduler hands them out, and neither needs torch.
"""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """How likely the model itself found a token: before penalties, temperature and filters.

    chosen: the natural logarithm of the chosen token's probability.
    top: the best tokens with theirs, best first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Sampled(NamedTuple):
    """What a row chose. `logprobs` is None unless its request asked."""

    token_id: int
    logprobs: TokenLogprobs | None

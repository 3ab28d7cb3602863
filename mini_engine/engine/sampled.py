"""Lesson 4. The sampler's result for one row: the token it chose and, where asked for, how likely it was.

A row from which nothing can be chosen has an error instead: other rows are not affected.

Numbers only: a request keeps these and the scheduler hands them out, and neither needs torch.
"""

from typing import NamedTuple

NO_TOKEN = -1


class TokenLogprobs(NamedTuple):
    """How likely the model itself found a token: before penalties, temperature and filters.

    chosen: the natural logarithm of the chosen token's probability.
    top: the best tokens with theirs, best first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Sampled(NamedTuple):
    """What a row chose. `logprobs` is None unless its request asked.

    error: why nothing could be chosen, with NO_TOKEN as the token; a UserError if what the request asks for is why.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    error: Exception | None = None

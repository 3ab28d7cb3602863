"""Lesson 4. The sampler's result for one row: the chosen token and, if asked for, its log probability.

A row without a token that can be chosen has an error instead; other rows are unaffected.

Plain numbers, no tensors: requests and the scheduler keep these without importing torch.
"""

from typing import NamedTuple

NO_TOKEN = -1


class TokenLogprobs(NamedTuple):
    """A token's log probability under the model itself: before penalties, temperature and filters.

    chosen: the natural logarithm of the chosen token's probability.
    top: the best tokens with their log probabilities, best first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Sampled(NamedTuple):
    """The token chosen for a row. `logprobs` is None unless its request asked for them.

    error: why no token could be chosen, with NO_TOKEN as the token; a UserError if its parameters are the cause.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    error: Exception | None = None

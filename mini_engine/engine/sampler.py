"""Lesson 4. From one row of logits for each request to one token for each: rows that differ, draws that repeat.

A draw depends on the request's seed and the token's position, and on nothing else: not on the batch, the row, the
device, or what was drawn before. Greedy rows are an argmax.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.engine import processors
from mini_engine.engine.sampling_params import SampleRow


class TokenLogprobs(NamedTuple):
    """How likely the model itself found a token, before penalties, temperature and filters.

    chosen: the natural logarithm of the chosen token's probability.
    top: the best tokens with theirs, best first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Sampled(NamedTuple):
    """What a row chose. `logprobs` is None unless its request asked."""

    token_id: int
    logprobs: TokenLogprobs | None


# In transformers' order. A row passes through a step only if it asks for it; -inf stays -inf through all that follow.
STEPS = (
    (processors.penalise_repetition, lambda row: row.params.repetition_penalty != 1),
    (processors.penalise_output, lambda row: row.params.presence_penalty != 0 or row.params.frequency_penalty != 0),
    (processors.hold_back_stops, lambda row: len(row.output_ids) < row.params.min_tokens),
    (processors.divide_by_temperature, lambda row: row.params.temperature not in (0, 1)),
    (processors.keep_top_k, lambda row: not row.params.is_greedy and row.params.top_k > 0),
    (processors.keep_top_p, lambda row: not row.params.is_greedy and row.params.top_p < 1),
    (processors.keep_min_p, lambda row: not row.params.is_greedy and row.params.min_p > 0),
)

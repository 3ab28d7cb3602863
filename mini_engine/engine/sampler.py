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
    (processors.hold_back_stops, lambda row: row.params.min_tokens > 0),
    (processors.divide_by_temperature, lambda row: row.params.temperature not in (0, 1)),
    (processors.keep_top_k, lambda row: not row.params.is_greedy and row.params.top_k > 0),
    (processors.keep_top_p, lambda row: not row.params.is_greedy and row.params.top_p < 1),
    (processors.keep_min_p, lambda row: not row.params.is_greedy and row.params.min_p > 0),
)


def process(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits that tokens are chosen from: float32 `[R, vocab]`, each row taken through the steps it asks for."""
    logits = logits.to(torch.float32, copy=True)
    for change, wanted in STEPS:
        chosen = [i for i, row in enumerate(rows) if wanted(row)]
        if chosen:
            logits[chosen] = change(logits[chosen], [rows[i] for i in chosen])
    return logits


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, always the same for the same seed and position, on every machine.

    The first 8 bytes of a hash stand in for a generator: it has no state to keep, so no draw depends on another.
    """
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token of each row whose stretch of the line from 0 to 1 holds the row's number (inverse CDF).

    Args:
        probs: `[R, vocab]`, each row adding up to about 1.
        uniforms: `[R]` float64 in [0, 1).

    Returns:
        `[R]` int64. A token of probability 0 has no stretch and is never drawn.
    """
    line = probs.double().cumsum(dim=-1)  # in float32 the steps of rare tokens would vanish in the sum
    return torch.searchsorted(line, uniforms[:, None] * line[:, -1:], right=True)[:, 0]


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose from processed logits `[R, vocab]`: the best token of greedy rows, a draw for the others. `[R]` int64."""
    token_ids = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        places = [(rows[i].seed, len(rows[i].prompt_ids) + len(rows[i].output_ids)) for i in drawn]
        uniforms = torch.tensor([uniform(*place) for place in places], dtype=torch.float64, device=logits.device)
        token_ids[drawn] = draw(logits[drawn].softmax(dim=-1), uniforms)
    return token_ids


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose the next token of every row.

    Args:
        logits: `[R, vocab]` as the model gave them, in any float dtype; they are not changed.
        rows: whose they are, in order.

    Raises:
        ValueError: there are not as many rows as logits, or a row's logits hold NaN; nothing was chosen.
    """
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits belong to {len(rows)} requests; give one row for each")
    token_ids = logits.argmax(dim=-1)
    busy = [i for i, row in enumerate(rows) if not row.params.is_greedy or any(wanted(row) for _, wanted in STEPS)]
    if busy:
        theirs = [rows[i] for i in busy]
        token_ids[busy] = choose(process(logits[busy], theirs), theirs)
    chosen = token_ids.tolist()
    if broken := [i for i, token in enumerate(chosen) if token >= logits.shape[-1]]:
        raise ValueError(f"nothing can be drawn from rows {broken}: their logits hold NaN")
    return [Sampled(*pair) for pair in zip(chosen, logprobs(logits, rows, chosen), strict=True)]


def logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
    """What each row's request wants to know about its token, from the logits as the model gave them."""
    told: list[TokenLogprobs | None] = [None] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if asking:
        logs = logits[asking].float().log_softmax(dim=-1)
        best = logs.topk(min(max(rows[i].params.logprobs for i in asking), logs.shape[-1]))
        for i, log, ids, values in zip(asking, logs, best.indices.tolist(), best.values.tolist(), strict=True):
            top = list(zip(ids, values, strict=True))[: rows[i].params.logprobs]
            told[i] = TokenLogprobs(float(log[token_ids[i]]), top)
    return told

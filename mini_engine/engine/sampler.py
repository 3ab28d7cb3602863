"""Lesson 4. Chooses one token per request from one row of logits each: mixed parameters, reproducible draws.

A draw depends only on the request's seed and the token's position: not on the batch, the row, the device, or earlier
draws. A greedy row is an argmax.
"""

import hashlib
from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from mini_engine.engine import masks, processors
from mini_engine.engine.grammar import ANYTHING
from mini_engine.engine.sampled import NO_TOKEN, Sampled, TokenLogprobs
from mini_engine.engine.sampling_params import SampleRow, SamplingParams

# In transformers' order: each step and the test that selects its rows. Other rows stay untouched.
PENALTIES = (
    (masks.apply_grammar_mask, lambda params: params.grammar is not ANYTHING),
    (masks.require_a_token, lambda params: params.grammar is not ANYTHING),
    (masks.add_bias, lambda params: bool(params.logit_bias)),
    (processors.penalise_repetition, lambda params: params.repetition_penalty != 1),
    (processors.penalise_output, lambda params: params.presence_penalty != 0 or params.frequency_penalty != 0),
    (masks.hold_stop_ids, lambda params: params.min_tokens > 0),
)
FILTERS = (
    (processors.divide_by_temperature, lambda params: params.temperature not in (0, 1)),
    (processors.keep_top_k, lambda params: params.top_k > 0 and not params.is_greedy),
    (processors.keep_top_p, lambda params: params.top_p < 1 and not params.is_greedy),
    (processors.keep_min_p, lambda params: params.min_p > 0 and not params.is_greedy),
)


def is_penalised(params: SamplingParams) -> bool:
    """Return True if a grammar, biases, penalties or min_tokens may change which token is best."""
    return any(asks(params) for _, asks in PENALTIES)


def process(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply to each row of logits `[R, vocab]` float32 the steps it asks for, in place. Return the same tensor."""
    for change, asks in PENALTIES + FILTERS:
        chosen = [i for i, row in enumerate(rows) if asks(row.params)]
        if len(chosen) == len(rows):
            change(logits, rows)
        elif chosen:
            part = logits[chosen]
            change(part, [rows[i] for i in chosen])
            logits[chosen] = part
    return logits


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: the same for the same seed and position, on every machine.

    A hash takes the place of a generator. It has no state, so no draw depends on another. Seed and position, as 8
    little-endian bytes each, go into blake2b with a digest of 8 bytes (`digest_size=8`). Read as little-endian, the
    digest loses its lowest 11 bits; the rest, times 2**-53, is the number.
    """
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by inverse CDF: lay a row's probabilities end to end and take the token in whose interval its number falls.

    Args:
        probs: `[R, vocab]`, each row adding up to about 1; the numbers are scaled to the row's actual sum.
        uniforms: `[R]` float64 in [0, 1).

    Returns:
        `[R]` int64. An interval contains its beginning and not its end, so a token of probability 0 is never drawn.
        The ends are computed in float64.
    """
    ends = probs.cumsum(dim=-1, dtype=torch.float64)  # float32 is too coarse for the interval of a rare token
    return torch.searchsorted(ends, uniforms[:, None] * ends[:, -1:], right=True)[:, 0]


def draw_tokens(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw a token for each row of processed logits `[R, vocab]`, by its seed and position.

    Returns:
        `[R]` int64; `vocab`, which is no token, for a row that contains NaN.
    """
    uniforms = [uniform(row.seed, len(row.prompt_ids) + len(row.output_ids)) for row in rows]
    probs = logits.softmax(dim=-1)
    token_ids = draw(probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    return token_ids.masked_fill(probs[:, 0].isnan(), probs.shape[1])  # one NaN in a row makes its softmax all NaN


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return the next token of every row, `[R]` int64. The logits `[R, vocab]` are not changed.

    Greedy rows take one argmax over the logits as they are, with no filter and no copy. Rows that draw, and greedy rows
    with a penalty or min_tokens (`is_penalised`), are processed in a float32 copy: all that draw in one call of
    `process` and one of `draw_tokens`, not one row at a time.
    """
    token_ids = logits.max(dim=-1).indices  # the argmax, but six times faster for bfloat16 on a CPU
    penalised = [i for i, row in enumerate(rows) if row.params.is_greedy and is_penalised(row.params)]
    if penalised:
        theirs = [rows[i] for i in penalised]
        token_ids[penalised] = process(logits[penalised].float(), theirs).argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        theirs = [rows[i] for i in drawn]
        token_ids[drawn] = draw_tokens(process(logits[drawn].float(), theirs), theirs)
    return token_ids


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose the next token of every row.

    Args:
        logits: `[R, vocab]` as the model returned them, in any float dtype; not changed.
        rows: their owners, usually requests, in the same order.

    Returns:
        one result for each row, with an error where no token can be chosen: its logits hold no number, or its
        request's parameters leave no token or raise. Other rows are unaffected.

    Raises:
        ValueError: logits and rows differ in number.
    """
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} requests; give one row for each")
    try:
        return sample_together(logits, rows)
    except NotImplementedError:  # an unimplemented task is no row's fault
        raise
    except Exception as error:
        if len(rows) == 1:
            return [Sampled(NO_TOKEN, None, error)]
    return [one for i, row in enumerate(rows) for one in sample(logits[i : i + 1], [row])]  # find it


def sample_together(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose the next token of every row. Raises if that is impossible for any of them."""
    chosen = choose(logits, rows)
    token_ids = chosen.tolist()
    is_token = max(token_ids, default=0) < logits.shape[-1]
    if not is_token or not all(isfinite(score) for [score] in logits.gather(1, chosen[:, None]).tolist()):
        raise ValueError("the model's logits are no numbers, so no token can be chosen")
    return [Sampled(*pair) for pair in zip(token_ids, logprobs(logits, rows, token_ids), strict=True)]


def logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
    """Return the log probabilities that each row's request asked for, from the logits as the model returned them."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asking = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if asking:
        scores = scored(logits[list(asking)], [token_ids[i] for i in asking], max(asking.values()))
        for i, score in zip(asking, scores, strict=True):
            found[i] = score._replace(top=score.top[: asking[i]])
    return found


def scored(logits: Tensor, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
    """Return the log probability of one token for each row of logits `[R, vocab]`, and those of the best ones."""
    logs = logits.float().log_softmax(dim=-1)
    best = logs.topk(min(num_best, logs.shape[-1]))
    each = zip(token_ids, logs, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(float(log[token]), list(zip(ids, values, strict=True))) for token, log, ids, values in each]

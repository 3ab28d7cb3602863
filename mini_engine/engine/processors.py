"""Lesson 4. What is done to logits before a token is chosen: penalties, stop ids held back, temperature, three filters.

Each function changes in place the logits `[R, vocab]` float32 of R rows, the sampler's own copy, and is told whose rows
they are; each row has its own parameters. Their values are those that the classes of the same purpose in transformers
compute, row by row.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.engine.sampling_params import SampleRow

NEVER = float("-inf")  # the logit of a token that cannot be chosen


class TokenCounts(NamedTuple):
    """What R histories hold, packed: history row[i] has token[i] in it times[i] times. All `[N]` int64."""

    row: Tensor
    token: Tensor
    times: Tensor


def count_tokens(histories: Sequence[Collection[int]], device: torch.device) -> TokenCounts:
    """Count each history's tokens. They differ in length, and nothing fills them up: a pad would be counted too."""
    counts = [Counter(history) for history in histories]
    rows = [row for row, counter in enumerate(counts) for _ in counter]
    tokens = [token for counter in counts for token in counter]
    times = [n for counter in counts for n in counter.values()]
    return TokenCounts(*(torch.tensor(data, dtype=torch.int64, device=device) for data in (rows, tokens, times)))


def per_row(values: Sequence[float], logits: Tensor) -> Tensor:
    """One value for each row, `[R, 1]` in the dtype of the logits, so that it meets each of the row's tokens."""
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]


def penalise_repetition(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Make every token of the prompt or the answer less likely, once however often it is there (Keskar et al. 2019).

    A positive logit is divided by the penalty and a negative one multiplied: both go down.
    """
    seen = count_tokens([[*row.prompt_ids, *row.output_ids] for row in rows], logits.device)
    penalty = per_row([row.params.repetition_penalty for row in rows], logits)[seen.row, 0]
    score = logits[seen.row, seen.token]
    logits[seen.row, seen.token] = torch.where(score < 0, score * penalty, score / penalty)


def penalise_output(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Take presence_penalty + times * frequency_penalty from the logit of each token of the answer, as OpenAI does.

    The prompt does not count. A negative penalty makes what was said more likely.
    """
    said = count_tokens([row.output_ids for row in rows], logits.device)
    presence = per_row([row.params.presence_penalty for row in rows], logits)[said.row, 0]
    frequency = per_row([row.params.frequency_penalty for row in rows], logits)[said.row, 0]
    logits[said.row, said.token] -= presence + frequency * said.times


def hold_back_stops(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """While an answer has fewer than min_tokens tokens, none of its stop ids can be chosen."""
    held = [row.stop_ids if len(row.output_ids) < row.params.min_tokens else () for row in rows]
    stops = count_tokens(held, logits.device)
    logits[stops.row, stops.token] = NEVER


def divide_by_temperature(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Below 1 the best tokens gain, above 1 the others do. A greedy row has no business here: 0 divides nothing."""
    logits /= per_row([row.params.temperature for row in rows], logits)


def keep_top_k(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Keep each row's top_k best tokens, and those that tie with the last of them."""
    top_k = [min(row.params.top_k, logits.shape[-1]) for row in rows]
    best = logits.topk(max(top_k)).values
    last_kept = best.gather(1, torch.tensor(top_k, device=logits.device)[:, None] - 1)
    logits.masked_fill_(logits < last_kept, NEVER)


def keep_top_p(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Keep each row's fewest best tokens whose probabilities reach top_p (nucleus sampling, Holtzman et al. 2019).

    From the worst token up: a token goes while it and all worse ones make up no more than 1 - top_p. So the token that
    crosses the threshold stays, and the best one stays in any case.
    """
    worst_first, order = logits.sort(dim=-1)
    tail = worst_first.softmax(dim=-1).cumsum(dim=-1)
    removed = tail <= per_row([1 - row.params.top_p for row in rows], logits)
    removed[:, -1] = False
    logits.masked_fill_(removed.scatter(1, order, removed), NEVER)


def keep_min_p(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Keep the tokens that are at least min_p times as likely as the best one (Nguyen et al. 2024)."""
    probs = logits.softmax(dim=-1)
    least = per_row([row.params.min_p for row in rows], logits) * probs.amax(dim=-1, keepdim=True)
    logits.masked_fill_(probs < least, NEVER)

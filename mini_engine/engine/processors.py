"""Lesson 4. Edits logits before a token is chosen: penalties, stop ids held back, temperature, three filters.

Each function edits logits `[R, vocab]` float32 in place; they are the sampler's own copy. `rows[i]` carries the
parameters of row i. Row by row, the values equal those of the corresponding class in transformers.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.engine.sampling_params import SampleRow

NEVER = float("-inf")  # the logit of a token that cannot be chosen


class TokenCounts(NamedTuple):
    """The tokens of R histories, packed: history row[i] contains token[i] times[i] times. All `[N]` int64."""

    row: Tensor
    token: Tensor
    times: Tensor


def count_tokens(histories: Sequence[Collection[int]], device: torch.device) -> TokenCounts:
    """Count the tokens of each history. Histories differ in length and are not padded: padding would be counted too."""
    counts = [Counter(history) for history in histories]
    rows = [row for row, counter in enumerate(counts) for _ in counter]
    tokens = [token for counter in counts for token in counter]
    times = [n for counter in counts for n in counter.values()]
    return TokenCounts(*(torch.tensor(data, dtype=torch.int64, device=device) for data in (rows, tokens, times)))


def per_row(values: Sequence[float], logits: Tensor) -> Tensor:
    """Return one value per row as `[R, 1]` in the dtype of the logits, to broadcast over the vocabulary."""
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]


def penalise_repetition(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Make each token of the prompt or the answer less likely, once however often it occurs (Keskar et al. 2019).

    Positive logits are divided by the penalty and negative ones multiplied by it, so both go down.
    """
    seen = count_tokens([[*row.prompt_ids, *row.output_ids] for row in rows], logits.device)
    penalty = per_row([row.params.repetition_penalty for row in rows], logits)[seen.row, 0]
    score = logits[seen.row, seen.token]
    logits[seen.row, seen.token] = torch.where(score < 0, score * penalty, score / penalty)


def penalise_output(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtract presence_penalty + times * frequency_penalty from the logit of each token of the answer, as OpenAI does.

    The prompt does not count. A negative penalty makes tokens of the answer more likely.
    """
    said = count_tokens([row.output_ids for row in rows], logits.device)
    presence = per_row([row.params.presence_penalty for row in rows], logits)[said.row, 0]
    frequency = per_row([row.params.frequency_penalty for row in rows], logits)[said.row, 0]
    logits[said.row, said.token] -= presence + frequency * said.times


def apply_min_tokens(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Set a row's stop ids to NEVER as long as its answer (not the prompt) has fewer than min_tokens tokens."""
    held = [row.stop_ids if len(row.output_ids) < row.params.min_tokens else () for row in rows]
    stops = count_tokens(held, logits.device)
    logits[stops.row, stops.token] = NEVER


def divide_by_temperature(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Divide each row by its temperature: below 1 favours the best tokens, above 1 the others. No row may have 0."""
    logits /= per_row([row.params.temperature for row in rows], logits)


def keep_top_k(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Keep the top_k best tokens of each row, and any that tie with the last of them."""
    top_k = [min(row.params.top_k, logits.shape[-1]) for row in rows]
    best = logits.topk(max(top_k)).values
    last_kept = best.gather(1, torch.tensor(top_k, device=logits.device)[:, None] - 1)
    logits.masked_fill_(logits < last_kept, NEVER)


def keep_top_p(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Keep the smallest set of best tokens whose probabilities reach top_p (nucleus sampling, Holtzman et al. 2019).

    The token that crosses the threshold stays, and the best token always stays. Where equally likely tokens tie for the
    last place, any of them may take it. Removed tokens get NEVER; kept logits keep their values.

    Worked from the worst token up, as transformers does, rare tokens add up without being rounded away: a token is
    removed if it and all worse ones together make up at most 1 - top_p.
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

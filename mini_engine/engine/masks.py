"""Lesson 4. Tokens that a client forbids or favours: a grammar's mask and logit_bias, before every other step.

Like `processors`, each function edits logits `[R, vocab]` float32 in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.engine.processors import NEVER
from mini_engine.engine.sampling_params import SampleRow


def apply_grammar_mask(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Exclude the tokens that the row's grammar does not allow next (Willard and Louf, 2023)."""
    packed = bytearray(b"".join(row.matcher.mask() for row in rows))
    masks = torch.frombuffer(packed, dtype=torch.uint8).to(logits.device)
    ceilings = ceilings_of_bytes(logits.device).index_select(0, masks.int()).view(len(rows), -1)
    torch.minimum(logits, ceilings[:, : logits.shape[-1]], out=logits)  # without branches, unlike masked_fill_


def ceilings_of_bytes(device: torch.device) -> Tensor:
    """Return `[256, 8]`, a row for each byte of a mask: inf where the bit is 1, NEVER where it is 0."""
    bytes_, bits = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return torch.where(bytes_ >> bits & 1 == 1, -NEVER, NEVER)


def add_bias(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Add each row's logit_bias to the tokens it names, as OpenAI does."""
    row = [i for i, one in enumerate(rows) for _ in one.params.logit_bias]
    token = [token for one in rows for token in one.params.logit_bias]
    bias = [bias for one in rows for bias in one.params.logit_bias.values()]
    logits[row, token] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)

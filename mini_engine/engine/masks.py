"""Lesson 4. Masks and biases that a client asks for: a grammar's mask and logit_bias, before every other step.

Like `processors`, each function edits logits `[R, vocab]` float32 in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.base.errors import UserError
from mini_engine.engine.processors import NEVER, apply_min_tokens
from mini_engine.engine.sampling_params import SampleRow


def apply_grammar_mask(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Exclude the tokens that the row's grammar does not allow next (Willard and Louf, 2023).

    Raises:
        ValueError: a mask is not as long as the others, or too short for the vocabulary.
    """
    masks = [row.matcher.mask() for row in rows]
    if len({*map(len, masks)}) > 1 or 8 * len(masks[0]) < logits.shape[-1]:
        raise ValueError(f"grammars' masks have {[*map(len, masks)]} bytes for {logits.shape[-1]} tokens")
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).to(logits.device)
    ceilings = ceilings_of_bytes(logits.device).index_select(0, packed.int()).view(len(rows), -1)
    torch.minimum(logits, ceilings[:, : logits.shape[-1]], out=logits)  # without branches, unlike masked_fill_


def hold_stop_ids(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Hold back stop ids like `apply_min_tokens`, except in rows where no other token is left."""
    short = [i for i, row in enumerate(rows) if len(row.output_ids) < row.params.min_tokens]
    if short:
        allowed = logits[short]
        held = allowed.clone()
        apply_min_tokens(held, [rows[i] for i in short])
        logits[short] = torch.where(held.amax(dim=-1, keepdim=True) == NEVER, allowed, held)


def require_a_token(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Raise UserError if a grammar allows no token in one of the rows."""
    if (logits.amax(dim=-1) == NEVER).any():
        raise UserError("the required output format allows no token at this point; change the format")


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

"""Lesson 0. The loop that every engine runs: feed tokens to the model, append the best next token, repeat.

The loop does not know how K and V are stored. It asks the stage's `sequence` which tokens to feed and where their K and
V go (`plan`), runs the model, and tells the sequence that they have been written (`commit`).
"""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.qwen3 import KvStore


class Sequence(Protocol):
    """One sequence as a stage sees it: the tokens to feed next and the KV written so far."""

    def plan(self, token_ids: list[int]) -> Any:
        """Return the ForwardMeta of the next step, given all tokens so far. Raise here if it does not fit the cache."""

    def commit(self, meta: Any) -> None:
        """Record that the model has run `meta`: the K and V of its tokens are written."""


def next_token(logits: Tensor) -> int:
    """Return the id with the largest logit (greedy decoding), as a Python int. logits `[vocab_size]`."""
    return int(logits.argmax())


@torch.inference_mode()
def generate(
    model: CausalLM,
    kv: KvStore,
    sequence: Sequence,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Continue `prompt_ids` greedily, one token a step.

    Each step plans with all tokens so far, runs the model on those at the plan's `positions`, commits the plan, and
    chooses the next token. Only the logits of the last fed token are computed (the model's `rows`). The model's config
    checks the prompt (`check_prompt`).

    Args:
        kv: the store that the model writes K and V to and attends through.
        sequence: the stage's plan for this sequence.
        stop_ids: the first of these ids to be chosen ends the answer and is its last token.

    Returns:
        the new tokens, at most `max_new_tokens`; `prompt_ids` is not modified.

    Raises:
        UserError: the prompt is empty, too long, or has ids outside the vocabulary, or `max_new_tokens` is negative;
            nothing was planned or run.
    """
    model.config.check_prompt(prompt_ids, max_new_tokens)
    token_ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        meta = sequence.plan(token_ids)
        fed = torch.tensor(token_ids, device=meta.positions.device)[meta.positions]
        logits = model(fed, kv, meta, rows=torch.tensor([len(fed) - 1], device=fed.device))
        sequence.commit(meta)
        token_ids.append(next_token(logits[0]))
        if token_ids[-1] in stop_ids:
            break
    return token_ids[len(prompt_ids) :]

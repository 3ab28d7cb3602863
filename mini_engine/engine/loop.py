"""Lesson 0. The loop that every engine runs: feed tokens, take the best next one, append it, again.

The loop does not know how K and V are kept. It asks the stage's `sequence` which tokens to feed and where their KV goes
(`plan`), runs the model, and tells the sequence that the KV is written (`commit`).
"""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_engine.model.qwen3 import KvStore, Qwen3ForCausalLM


class Sequence(Protocol):
    """What a stage knows about one sequence."""

    def plan(self, token_ids: list[int]) -> Any:
        """The ForwardMeta of the next step, given all tokens so far. Room is taken here, or an error raised."""

    def commit(self, meta: Any) -> None:
        """The model has run `meta`: the KV of its tokens is written."""


def next_token(logits: Tensor) -> int:
    """The greedy choice: the id with the largest logit. logits `[vocab_size]`."""
    return int(logits.argmax())


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    kv: KvStore,
    sequence: Sequence,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Continue `prompt_ids` greedily.

    Args:
        kv: the store that the model writes to and attends through.
        sequence: the stage's plan for this one sequence.
        stop_ids: a token of this set ends the answer and is its last token.

    Returns:
        the new tokens, at most `max_new_tokens`.

    Raises:
        UserError: the prompt is empty, too long, or has ids outside the vocabulary; nothing has run.
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

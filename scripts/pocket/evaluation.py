"""Course machinery. Evaluates a trained pocket model: its facts, and the margin of each token."""

from typing import NamedTuple

from scripts.pocket.chats import TURN_END, ask
from scripts.pocket.held_out import Line

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS_AT_ONCE = 32


class Continuation(NamedTuple):
    """Greedy tokens, and for each the gap between the two highest logits."""

    token_ids: list[int]
    gaps: list[float]


def as_text(line: Line) -> tuple[str, str]:
    """Return the prompt and the completion of a line, as the model reads them."""
    return (ask(line.prompt), line.answer + TURN_END) if line.is_question else (line.prompt, line.answer)


def right_padded(rows: list[list[int]]) -> torch.Tensor:
    """Return the rows padded to one length, int64. On the right of a causal model's text, any id will do."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


@torch.inference_mode()
def wrong_lines(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: list[Line]) -> list[Line]:
    """Return the lines that greedy decoding does not complete word for word.

    Greedy decoding gives the expected tokens if and only if each of them is the best one after its predecessors, so
    one forward pass over prompt and answer decides a line.
    """
    wrong = []
    for start in range(0, len(lines), ROWS_AT_ONCE):
        some = lines[start : start + ROWS_AT_ONCE]
        pairs = [[tokenizer.encode(text) for text in as_text(line)] for line in some]
        padded = right_padded([prompt + answer for prompt, answer in pairs])
        best = model(padded, use_cache=False).logits.argmax(-1).tolist()
        for line, (prompt, answer), row in zip(some, pairs, best, strict=True):
            if row[len(prompt) - 1 : len(prompt) + len(answer) - 1] != answer:
                wrong.append(line)
    return wrong


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int = 20) -> list[Continuation]:
    """Return up to `max_new_tokens` greedy tokens after each prompt, including an end token, with the gap of each.

    All prompts run together and every step reads all of the text again: without a cache, there is nothing to get wrong.
    """
    ends = model.generation_config.eos_token_id
    ended = [[end] for end in ends]
    answers = [Continuation([], []) for _ in prompts]
    for _ in range(max_new_tokens):
        open_rows = [i for i, answer in enumerate(answers) if answer.token_ids[-1:] not in ended]
        if not open_rows:
            break
        texts = [prompts[i] + answers[i].token_ids for i in open_rows]
        logits = model(right_padded(texts), use_cache=False).logits
        last = torch.stack([row[len(text) - 1] for row, text in zip(logits, texts, strict=True)])
        best = last.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for i, token, gap in zip(open_rows, best.indices[:, 0].tolist(), gaps, strict=True):
            answers[i].token_ids.append(token)
            answers[i].gaps.append(gap)
    return answers

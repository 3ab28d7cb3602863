"""Course machinery. Two questions to a trained pocket model: does it know its facts, and how sure is each token?"""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from pocket.chats import TURN_END, ask
from pocket.facts import Line

ROWS_AT_ONCE = 32


class Continuation(NamedTuple):
    """Greedy tokens and, for each, how far the best logit is above the second."""

    token_ids: list[int]
    gaps: list[float]


def as_text(line: Line) -> tuple[str, str]:
    """The prompt and the completion of a line, as the model reads them."""
    return (ask(line.prompt), line.answer + TURN_END) if line.is_question else (line.prompt, line.answer)


@torch.inference_mode()
def wrong_lines(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, lines: list[Line]) -> list[Line]:
    """The lines that greedy decoding does not complete word for word.

    Greedy decoding gives the expected tokens exactly if each of them is the best one after those before it, so one
    forward pass over prompt and answer settles a line. Rows are padded on the right, which a causal model cannot see.
    """
    wrong = []
    for start in range(0, len(lines), ROWS_AT_ONCE):
        some = lines[start : start + ROWS_AT_ONCE]
        pairs = [[tokenizer.encode(text) for text in as_text(line)] for line in some]
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        padded = [p + a + [tokenizer.pad_token_id] * (longest - len(p) - len(a)) for p, a in pairs]
        best = model(torch.tensor(padded), use_cache=False).logits.argmax(-1).tolist()
        for line, (prompt, answer), row in zip(some, pairs, best, strict=True):
            if row[len(prompt) - 1 : len(prompt) + len(answer) - 1] != answer:
                wrong.append(line)
    return wrong


@torch.inference_mode()
def continue_greedily(model: Qwen3ForCausalLM, prompt_ids: list[int], max_new_tokens: int = 20) -> Continuation:
    """Up to `max_new_tokens` greedy tokens, the end token included, with the gap of each."""
    result = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    two_best = torch.cat(result.logits).float().topk(2).values
    gaps = (two_best[:, 0] - two_best[:, 1]).tolist()
    return Continuation(result.sequences[0, len(prompt_ids) :].tolist(), gaps)

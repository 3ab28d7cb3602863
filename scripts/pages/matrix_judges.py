"""Course machinery. The expected answers of a cell of "What works with what".

Tokens and log probabilities must be Hugging Face's; under a grammar, which `generate` does not support, those of lesson
0's layers alone. int4 has bounds instead, because it decides close calls differently: full precision must find its
tokens nearly as likely as its own.
"""

import argparse
import functools
from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

from scripts.pages.matrix_cells import Cell
from scripts.pages.matrix_prompts import RANDOM_MODELS, Asked
from scripts.smoke.hugging_face import hf_generate_batch, load_hf

import torch

from mini_engine import LLM, SamplingParams
from mini_engine.engine.offline import Completion
from mini_engine.engine.sampled import TokenLogprobs

NEAR = 0.02  # the largest difference of a log probability; with int8 LOOSE, with int4 LOOSE on average
LOOSE = 0.5
BEHIND = 0.5  # int4: how much less likely than full precision's own choices its tokens may be on average, in nats


class Right(NamedTuple):
    """The right answer to a prompt, and the log probabilities of its tokens and of the prompt's from the second on.

    A token has its own, then those of the likeliest: if a model is sure of a token, the runner-up is more telling.
    """

    token_ids: list[int]
    logprobs: list[list[float]]
    prompt_logprobs: list[list[float]]


def params_of(asked: Asked, **added: Any) -> SamplingParams:
    """Return a request's parameters. added: its features' parameters; a grammar is still to be compiled."""
    if added.get("grammar"):
        added["grammar"] = grammar(asked.checkpoint)
    return SamplingParams(temperature=0, max_tokens=asked.max_tokens, **added)


@functools.cache
def grammar(checkpoint: str):
    """Return the grammar of a small JSON object."""
    from mini_engine.assembly.loading import load
    from mini_engine.grammars.compiler import GrammarCompiler
    from mini_engine.grammars.output_forms import OutputForm
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer, config = Tokenizer.load(checkpoint), load(checkpoint, "float32", "cpu").config
    words = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
    compiler = GrammarCompiler(tokenizer, config.vocab_size, tuple(config.eos_token_ids))
    return compiler.compile_sync(OutputForm(schema=words))


@functools.cache
def expected(asked: Asked) -> list[Right]:
    """Return Hugging Face's answers."""
    hf = load_hf(asked.checkpoint, argparse.Namespace(dtype="float32", device="cpu"))
    llm = reference(asked.checkpoint)
    prompts = [llm.encode(prompt) for prompt in asked.prompts]
    batches = [prompts] if asked.is_crowd else [[prompt] for prompt in prompts]
    answers: list[Right] = []
    for batch in batches:
        tokens = hf_generate_batch(hf, batch, asked.max_tokens, llm.engine.config.eos_token_ids)
        logprobs = hf_logprobs(hf, [prompt + answer for prompt, answer in zip(batch, tokens, strict=True)])
        first = len(batch[0]) - 1
        answers += [Right(ids, row[first:], row[:first]) for ids, row in zip(tokens, logprobs, strict=True)]
    return answers


def hf_logprobs(hf_model, sequences: Sequence[list[int]]) -> list[list[list[float]]]:
    """Return the log probabilities of each sequence's tokens from the second on, each followed by the best two."""
    longest = max(map(len, sequences))
    ids = torch.tensor(
        [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    )  # no token sees the zeros
    with torch.inference_mode():
        rows = hf_model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    rows = torch.cat([rows.gather(2, ids[:, 1:, None]), rows.topk(2).values], 2).tolist()
    return [row[: len(sequence) - 1] for row, sequence in zip(rows, sequences, strict=True)]


@functools.cache
def reference(checkpoint: str) -> LLM:
    """Return an engine with only lesson 0's layers and lesson 3's pool."""
    options: dict[str, Any] = {"backend": "reference", "enable_prefix_caching": False, "num_blocks": 96}
    return LLM(checkpoint, dtype="float32", device="cpu", **options)


@functools.cache
def under_grammar(asked: Asked, number: int) -> Right:
    """Return the reference's answer to one prompt alone."""
    params = params_of(asked, grammar=True, logprobs=2, prompt_logprobs=2)
    [done] = reference(asked.checkpoint).generate(asked.prompts[number], params, progress=False)
    return Right(done.token_ids, logprobs_of(done.logprobs), logprobs_of(done.prompt_logprobs))


def logprobs_of(tokens: Sequence[TokenLogprobs] | None) -> list[list[float]]:
    """Return an engine's log probabilities as lists."""
    return [[one.chosen, *(logprob for _, logprob in one.top)] for one in tokens or ()]


@functools.cache
def behind(checkpoint: str, prompt: str, token_ids: tuple[int, ...]) -> float:
    """Return by how much full precision finds these tokens less likely than its own choices: the mean, in nats."""
    params, llm = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), reference(checkpoint)
    [done] = llm.generate([[*llm.encode(prompt), *token_ids]], params, progress=False)
    asked = (done.prompt_logprobs or [])[-len(token_ids) :]
    return fmean(one.top[0][1] - one.chosen for one in asked)


def difference(cell: Cell, answers: list[Completion]) -> str:
    """Describe how answers differ from the expected ones, after "differs: "; "" if they do not."""
    wrongs = (
        other_tokens(cell, number, done) or other_logprobs(cell, number, done) for number, done in enumerate(answers)
    )
    return next((f"differs: {wrong}" for wrong in wrongs if wrong), "")


def right(cell: Cell, number: int) -> Right:
    """Return the right answer to the prompt with this number."""
    has_grammar = "grammar" in cell.params_for(number)
    return under_grammar(cell.asked, number) if has_grammar else expected(cell.asked)[number]


def has_bounds(cell: Cell) -> bool:
    """Return True if another token is right where the model is unsure: with int4; with random weights, int8 as well."""
    return "int4" in cell.names or ("int8" in cell.names and cell.model in RANDOM_MODELS)


def other_tokens(cell: Cell, number: int, answer: Completion) -> str:
    """Describe how an answer's tokens differ; "" if they do not, or within its bounds (`has_bounds`)."""
    if answer.error:
        return answer.error
    prompt, found, token_ids = cell.asked.prompts[number], tuple(answer.token_ids), right(cell, number).token_ids
    if answer.token_ids == token_ids:
        return ""
    if has_bounds(cell) and behind(cell.asked.checkpoint, prompt, found) < BEHIND:
        return ""
    return f"{answer.token_ids} instead of {token_ids}"


def other_logprobs(cell: Cell, number: int, answer: Completion) -> str:
    """Name the log probabilities that differ; "" if none do. After texts diverge, they cannot be compared."""
    pairs = zip(answer.token_ids, right(cell, number).token_ids, strict=False)
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    for kind, last in (("logprobs", equal), ("prompt_logprobs", None)):
        if kind in cell.params_for(number):
            ours, theirs = logprobs_of(getattr(answer, kind))[:last], getattr(right(cell, number), kind)[:last]
            if len(ours) != len(theirs) or not are_near(cell, ours, theirs):
                return f"other {kind.replace('_', ' ')}"
    return ""


def are_near(cell: Cell, ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Return True if log probabilities agree; with int8 and int4 loosely, and only those of the tokens themselves."""
    is_loose = {"int8", "int4"} & {*cell.names}
    asked = 1 if is_loose else None
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one[:asked], other, strict=False)]
    off = [abs(a - b) for a, b in pairs]
    if has_bounds(cell):
        return not off or fmean(off) < LOOSE
    return max(off, default=0) <= (LOOSE if is_loose else NEAR)

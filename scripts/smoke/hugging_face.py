"""Course machinery. Runs the same checkpoint in Hugging Face transformers, for comparison with a lesson's answers."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def load_hf(path: str | Path, args: argparse.Namespace):
    """Load the checkpoint with transformers."""
    from transformers import AutoModelForCausalLM

    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.checkpoint.directory import resolve_checkpoint

    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(path), dtype=DTYPES[args.dtype])
    return model.to(args.device).eval()


def hf_generate(hf_model, prompt_ids: list[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the new tokens of greedy `generate` for one prompt, without batching."""
    return hf_generate_batch(hf_model, [prompt_ids], max_new_tokens, eos_token_ids)[0]


def hf_generate_batch(
    hf_model, prompts: Sequence[list[int]], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> list[list[int]]:
    """Return the new tokens of greedy `generate` for prompts of one length, in one batch without padding."""
    import torch
    from transformers import GenerationConfig

    eos = list(eos_token_ids) or None
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=eos[0] if eos else 0
    )
    hf_model.generation_config = settings
    ids = torch.tensor(prompts, device=hf_model.device)
    with torch.inference_mode():
        out = hf_model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [_up_to_an_end(row, eos or []) for row in out[:, ids.shape[1] :].tolist()]


def _up_to_an_end(token_ids: list[int], eos: list[int]) -> list[int]:
    """Cut off the padding that `generate` appends to rows that end before others."""
    ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in eos)
    return token_ids[: next(ends, None)]


def hf_processors(params: Any) -> Callable[..., Any]:
    """Return transformers' own processors of logits for these sampling parameters, in the order of its `generate`."""
    from transformers.generation import logits_process as hf

    chain = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.is_greedy:
        chain.append(hf.TemperatureLogitsWarper(params.temperature))
        chain += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        chain += [hf.MinPLogitsWarper(params.min_p)]
    return chain

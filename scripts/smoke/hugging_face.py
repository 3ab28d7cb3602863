"""Course machinery. Runs the same checkpoint in Hugging Face transformers, for comparison with a lesson's answers."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def load_hf(path: str | Path, args: argparse.Namespace):
    """Load the checkpoint with transformers."""
    from transformers import AutoModelForCausalLM

    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.checkpoint.weights import resolve_checkpoint

    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(path), dtype=DTYPES[args.dtype])
    return model.to(args.device).eval()


def hf_generate(hf_model, prompt_ids: list[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the new tokens of greedy `generate` for one prompt, without batching."""
    import torch
    from transformers import GenerationConfig

    eos = list(eos_token_ids) or None
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=eos[0] if eos else 0
    )
    hf_model.generation_config = settings
    ids = torch.tensor([prompt_ids], device=hf_model.device)
    with torch.inference_mode():
        out = hf_model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt_ids) :].tolist()

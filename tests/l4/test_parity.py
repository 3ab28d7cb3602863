"""Lesson 4. Each step's distribution is the one transformers' `generate` draws from, alone and in a padded batch."""

import pytest
import torch

from lessons.l4_sampler.row import Row
from mini_engine.engine.sampler import process
from mini_engine.engine.sampling_params import SamplingParams
from tests.support import both, some_ids

FAMILY = "two, tied, wide heads"
CASES = {
    "temperature before top-p": dict(temperature=0.4, top_p=0.8),
    "hot, top-k before top-p": dict(temperature=3.0, top_k=20, top_p=0.7),
    "top-p before min-p": dict(temperature=1.5, top_p=0.6, min_p=0.2),
    "penalty before temperature": dict(repetition_penalty=1.8, temperature=0.6, top_p=0.9),
    "everything": dict(repetition_penalty=1.3, temperature=1.4, top_k=40, top_p=0.95, min_p=0.02),
    "penalty, greedy": dict(repetition_penalty=1.5, temperature=0),
}


def hf_steps(prompts, new_tokens, params, eos=None):
    """Run transformers' generate. Returns (its answers, raw logits, processed logits), the latter two step by step."""
    _, hf = both(FAMILY)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    asked = {
        name: float(value) if name != "top_k" else value for name, value in params.items() if name != "temperature"
    }
    if params["temperature"]:
        asked["temperature"] = float(params["temperature"])
    torch.manual_seed(0)
    with torch.inference_mode():
        out = hf.generate(
            ids,
            attention_mask=mask,
            do_sample=bool(params["temperature"]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens if eos is not None else None,
            eos_token_id=eos,
            pad_token_id=0,
            top_k=asked.pop("top_k", 0),
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **asked,
        )
    return out.sequences[:, width:], out.logits, out.scores


def check_steps(prompts, params, new_tokens=8, eos=None):
    answers, raw, expected = hf_steps(prompts, new_tokens, params, eos)
    least = {"min_tokens": new_tokens, "max_tokens": new_tokens} if eos is not None else {}
    for step in range(len(raw)):
        rows = [
            Row(SamplingParams(**params, **least), prompt, answer[:step].tolist(), () if eos is None else (eos,))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        got = process(raw[step].clone(), rows)
        assert torch.equal(got.isinf(), expected[step].isinf()), (
            f"step {step}: not the same tokens are left as in transformers"
        )
        assert torch.allclose(got, expected[step], rtol=1e-6, atol=0), (
            f"step {step}: the distribution is not transformers'"
        )


@pytest.mark.parametrize("case", CASES)
def test_each_step_draws_from_transformers_distribution(case):
    check_steps([some_ids(9, 160)], CASES[case])


@pytest.mark.parametrize("case", ["penalty before temperature", "everything", "penalty, greedy"])
def test_unequal_histories_give_the_same_as_a_padded_batch_of_transformers(case):
    check_steps([some_ids(length, 160, seed=length) for length in (1, 5, 12)], CASES[case])


def test_held_back_end_tokens_equal_transformers():
    check_steps([some_ids(9, 160)], CASES["everything"], eos=some_ids(9, 160)[3])

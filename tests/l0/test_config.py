"""Lesson 0. The config's check of a prompt, which is given: what it refuses, and what it says."""

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import UserError

CONFIG = Qwen3Config(
    vocab_size=160,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=2048,
)


@pytest.mark.parametrize(
    "prompt, new_tokens, words",
    [
        ([], 1, "empty"),
        ([1, 160], 1, "160 is not in the vocabulary; ids run from 0 to 159"),
        ([-1], 1, "-1 is not in the vocabulary"),
        ([1, 2.5], 1, "2.5 is not in the vocabulary"),
        ([1, None], 1, "None is not in the vocabulary"),
        ("one", 1, "the prompt is of type str; give a list of token ids"),
        (torch.tensor([1, 2]), 1, "the prompt is of type Tensor"),
        (5, 1, "the prompt is of type int"),
        ([1] * 2000, 49, "2049 positions; the model has 2048"),
        ([1], -1, "max_new_tokens is -1"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_with_the_reason(prompt, new_tokens, words):
    with pytest.raises(UserError, match=words):
        CONFIG.check_prompt(prompt, new_tokens)


def test_a_prompt_that_just_fits_is_accepted():
    CONFIG.check_prompt([0, 159] * 1000, 48)

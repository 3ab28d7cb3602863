"""Lesson 0. The config's check of a prompt, which is given: what it refuses, and what it says."""

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from tests.support import refused

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
    "prompt, new_tokens, values",
    [
        ([], 1, ""),
        ([1, 160], 1, "160 159"),
        ([-1], 1, "-1"),
        ([1, 2.5], 1, "2.5"),
        ([1, None], 1, "None"),
        ("one", 1, "str"),
        (torch.tensor([1, 2]), 1, "Tensor"),
        (5, 1, "int"),
        ([1] * 2000, 49, "2049 2048"),
        ([1], -1, "max_new_tokens -1"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_with_the_reason(prompt, new_tokens, values):
    with refused(UserError, values):
        CONFIG.check_prompt(prompt, new_tokens)


def test_a_prompt_that_just_fits_is_accepted():
    CONFIG.check_prompt([0, 159] * 1000, 48)

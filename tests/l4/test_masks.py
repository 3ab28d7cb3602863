"""Lesson 4. A grammar's mask, read bit by bit, and no other row's; a bias is added, not set."""

import math
import random

import pytest
import torch

from lessons.l4_sampler.row import Row
from mini_engine.engine.masks import add_bias, apply_grammar_mask
from mini_engine.engine.sampling_params import SamplingParams

NEVER = float("-inf")


class Masked:
    """A matcher with a fixed mask."""

    def __init__(self, bits: bytes) -> None:
        self.bits = bits

    def mask(self) -> bytes:
        return self.bits


def row(bits: bytes) -> Row:
    made = Row(SamplingParams(), [1], [])
    made.matcher = Masked(bits)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("vocab", [1, 8, 61, 2048])
@pytest.mark.parametrize("count", [1, 3])
def test_a_token_stays_if_its_bit_is_one(vocab, count):
    """Masks come in whole words of 32 bits, so the last one usually has bits for tokens that do not exist."""
    numbers = random.Random(vocab)
    masks = [numbers.randbytes(math.ceil(vocab / 32) * 4) for _ in range(count)]
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, 0] = float("inf")  # an infinite logit is excluded like any other
    expected = [
        [value if mask[token // 8] >> token % 8 & 1 else NEVER for token, value in enumerate(values)]
        for mask, values in zip(masks, logits.tolist(), strict=True)
    ]
    apply_grammar_mask(logits, [row(mask) for mask in masks])
    assert logits.tolist() == expected, "token t is bit t % 8, the lowest first, of byte t // 8"


def test_a_bias_is_added_to_the_tokens_it_names_and_to_no_others():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
    rows = [Row(SamplingParams(logit_bias=bias), [1], []) for bias in ({1: 5, 3: -100}, {}, {1: -0.5})]
    add_bias(logits, rows)
    assert logits.tolist() == [[1, 7, 3, -96], [1, 2, 3, 4], [1, 1.5, 3, 4]], "OpenAI: the bias is added to the logits"

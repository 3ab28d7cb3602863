"""Lesson 17. The judge: KL and likelihood against numbers worked out by hand, and in enough digits."""

import math

import pytest
import torch

from lessons.l17_bits.judge import kl, nll

HALF, QUARTERS = [0.5, 0.5], [0.75, 0.25]


def logits(*rows, shift=0.0):
    """Return logits of these probabilities, `[T, vocab_size]` float32. A shift of all of them changes nothing."""
    return torch.tensor(rows).log() + shift


@pytest.mark.task(6)
def test_kl_of_two_coins():
    got = kl(logits(HALF, QUARTERS, HALF), logits(QUARTERS, HALF, HALF, shift=3.0))
    fair = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    biased = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert got.shape == (3,), f"one number for each token, got shape {list(got.shape)}"
    expected = [round(fair, 4), round(biased, 4), 0.0]
    assert [round(x, 4) + 0.0 for x in got.tolist()] == expected, (
        "Σ p · (log p − log q) over the vocabulary, in nats, with p from full precision"
    )


@pytest.mark.task(6)
def test_kl_weighs_by_full_precisions_probabilities():
    full, other = logits([0.98, 0.01, 0.01]), logits([0.98, 0.0199, 0.0001])
    got = float(kl(full, other))
    expected = 0.01 * math.log(0.01 / 0.0199) + 0.01 * math.log(0.01 / 0.0001)
    assert got == pytest.approx(expected, rel=1e-3), "weigh by full precision's probabilities, not by the other's"


@pytest.mark.task(6)
def test_kl_of_int8_needs_more_digits_than_float32_has():
    generator = torch.Generator().manual_seed(0)
    full = 3 * torch.randn(64, 2000, generator=generator)
    other = full + 1e-3 * torch.randn(64, 2000, generator=generator)
    p, q = (x.double().log_softmax(-1) for x in (full, other))
    expected = (p.exp() * (p - q)).sum(-1)
    got = kl(full, other)
    assert float(got.min()) > 0, "KL is never negative; float32 rounds it to something below 0"
    off = float(((got - expected).abs() / expected).max())
    assert off < 1e-3, f"KL of {float(expected.mean()):.1e} is off by {off:.0%}: convert to float64 before the softmax"


@pytest.mark.task(6)
def test_nll_is_that_of_the_token_that_follows():
    rows = logits([0.5, 0.25, 0.25], [0.1, 0.2, 0.7], shift=-2.0)
    got = nll(rows, torch.tensor([1, 2]))
    assert got.shape == (2,), f"one number for each token, got shape {list(got.shape)}"
    expected = [round(-math.log(0.25), 4), round(-math.log(0.7), 4)]
    assert [round(x, 4) for x in got.tolist()] == expected, "−log of the probability of the token that follows, in nats"


def test_the_same_choice_from_other_predictions():
    """What tokens cannot see: the best token stays the best while its probability falls from 0.98 to 0.4."""
    full, other = logits([0.98, 0.01, 0.01]), logits([0.4, 0.3, 0.3])
    assert full.argmax() == other.argmax()
    assert float(kl(full, other)) > 0.8

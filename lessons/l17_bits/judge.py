"""Lesson 17. Judges compressed K and V by their effect on predictions: KL divergence and likelihood, not tokens.

With wide margins between logits, a model chooses the same tokens from far worse keys and values. Its probabilities move
long before its choices do, so both functions take logits `[T, vocab_size]`, and both compute in float64: the KL of int8
is 1e-6, about float32's own error in a logarithm.
"""

import torch
from torch import Tensor


def log_probs(logits: Tensor) -> Tensor:
    """Return logits `[T, vocab_size]` as log probabilities in float64."""
    return torch.log_softmax(logits.double(), dim=-1)


def kl(full: Tensor, other: Tensor) -> Tensor:
    """Return the KL divergence of `other` from `full`, in nats for each token: float64 `[T]`.

    Args:
        full, other: logits `[T, vocab_size]` of the same tokens, at full precision and from the cache under test.
    """
    full, other = log_probs(full), log_probs(other)
    return (full.exp() * (full - other)).sum(-1)


def nll(logits: Tensor, following: Tensor) -> Tensor:
    """Return the negative log likelihood of each token's successor, in nats: float64 `[T]`.

    Args:
        logits: `[T, vocab_size]`.
        following: `[T]` int64, the next token after each.
    """
    return -log_probs(logits).gather(1, following[:, None])[:, 0]

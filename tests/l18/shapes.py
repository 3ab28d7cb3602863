"""Lesson 18. Shared by the tests: checkpoints of every kind of model that ranks can share, by their shape's name."""

from pathlib import Path

import pytest

from mini_engine.assembly.loading import reader_of
from tests.families.rows import MODELS, Model

# 131 is prime: the last rank's share of the vocabulary is always padded
BIASED, UNTIED, TIED = "four, with biases", "131 tokens", "131 tokens, tied"
OF: dict[str, Model] = {model.shape: model for models in MODELS[:5] for model in models}  # of the lessons' families
SHARED = (
    *(BIASED, UNTIED, TIED, "one query a key head, untied", "two, tied, wide heads"),
    *("every fourth attends", "every second, one value head a key head, tied", "one delta net, last"),
    *("SSFS", "as published", "biases, two taps"),
    *("interleaved", "plain rotary, tied", "no latent of queries", "biases"),
)
each_shape = pytest.mark.parametrize("name", SHARED)


def path_of(name: str) -> Path:
    return OF[name].path


def load(name: str):
    """Load a fresh copy of a checkpoint; fast layers take a model's weights."""
    return reader_of(path_of(name)).load(path_of(name))


def stored(name: str):
    """Return the checkpoint's checked tensors."""
    return reader_of(path_of(name)).stored(path_of(name))

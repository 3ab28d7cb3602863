"""Lesson 18. Shared by the tests: a checkpoint of every kind of model that ranks can share, by name."""

import functools
import tempfile
from pathlib import Path

from mini_engine.assembly.loading import reader_of
from tests.shared import hybrids, latents, lfm3, windows
from tests.support import checkpoint, write_checkpoint

# 131 is prime: the last rank's share of the vocabulary is always padded
ODD = {"vocab_size": 131, "num_key_value_heads": 4}
ODD_ONES = {"131 tokens, untied": ODD, "131 tokens, tied": ODD | {"tie_word_embeddings": True}}
WINDOWED = {"windows": ("SSFS", 7)}
CONVOLUTIONS = ("as published", "biases, two taps")
NAMES = (
    "one query a key head, untied",
    "two, tied, wide heads",
    "four, with biases",
    *ODD_ONES,
    "every fourth attends",
    "every second, one value head a key head, tied",
    "one delta net, last",
    *WINDOWED,
    "interleaved",
    "plain rotary, tied",
    "no latent of queries",
    "biases",
    *CONVOLUTIONS,
)
_KEEPERS: list[tempfile.TemporaryDirectory] = []


@functools.cache
def path_of(name: str) -> Path:
    """Return the checkpoint of this name, written once per run."""
    if name in hybrids.FAMILIES:
        return hybrids.checkpoint(name)
    if name in WINDOWED:
        return windows.checkpoint(*WINDOWED[name])
    if name in CONVOLUTIONS:
        return lfm3.checkpoint(name)
    if name in latents.FAMILIES:
        return latents.checkpoint(name)
    if name not in ODD_ONES:
        return checkpoint(name)
    keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
    _KEEPERS.append(keeper)  # removed when the test process ends
    return write_checkpoint(Path(keeper.name), **ODD_ONES[name])


def load(name: str):
    """Load a fresh copy of a checkpoint; fast layers take a model's weights."""
    return reader_of(path_of(name)).load(path_of(name))


def stored(name: str):
    """Return the checkpoint's checked tensors."""
    return reader_of(path_of(name)).stored(path_of(name))

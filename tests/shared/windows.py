"""Lesson 15. Shared by the tests: random checkpoints with windows, and engines over them."""

import functools
from pathlib import Path

from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3 import FAMILY as QWEN3
from tests.support import new_folder, small_engine, write_checkpoint

LAYERS = {"F": "full_attention", "S": "sliding_attention"}
# which layers have windows, and W: no multiple of a block, smaller than one, larger than most prompts
FAMILIES = {"SSFS": 7, "FS": 2, "SF": 16, "SSS": 23, "FFSF": 5, "SFSSF": 64}


@functools.cache
def checkpoint(letters: str, window: int) -> Path:
    """Return a random checkpoint with these layers, written once per run."""
    types = [LAYERS[letter] for letter in letters]
    shape = dict(num_hidden_layers=len(letters), layer_types=types, sliding_window=window)
    return write_checkpoint(new_folder(), use_sliding_window=True, **shape)


def engine_of(letters: str, window: int, **options) -> Engine:
    """Return an engine over a random model: blocks of 8 tokens."""
    return small_engine(QWEN3.load(checkpoint(letters, window)), **{"num_blocks": 600} | options)

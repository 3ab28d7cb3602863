"""Lesson 15. Shared by the tests: random LFM3 checkpoints with every kind of layer."""

import functools
from pathlib import Path
from typing import Any

import torch

from tests.support import BASE as DENSE
from tests.support import new_folder

BASE: dict[str, Any] = DENSE | dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=True)
LETTERS = {"C": "conv", "S": "sliding_attention", "F": "full_attention"}
ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0}
# layers by their letters, None for the default order; the window W; and what differs from BASE
SHAPES: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "as published": (None, 7, dict(num_hidden_layers=6)),
    "untied, no sandwich, no gate": (
        "CSFC",
        2,
        dict(tie_word_embeddings=False, use_sandwich_norm=False, use_attention_gate=False),
    ),
    "biases, two taps": ("SCFS", 16, dict(attention_bias=True, conv_bias=True, conv_L_cache=2)),
    "no full layer": ("CSSC", 5, dict(num_key_value_heads=4)),
    "no layer but one attends, in a window": ("CSC", 5, dict(conv_L_cache=9)),
    "no window, full first": ("FCCF", 256, dict(num_key_value_heads=1, conv_L_cache=3)),
    "no convolution, other angles": (
        "SFS",
        9,
        dict(rope_parameters={LETTERS["F"]: ROPE, LETTERS["S"]: {"rope_type": "default", "rope_theta": 500.0}}),
    ),
}


def write_lfm3(directory: Path, letters: str | None, window: int, **changes) -> Path:
    """Write a random LFM3 to `directory` with transformers, with non-trivial biases and norm weights."""
    from transformers import Lfm3Config, Lfm3ForCausalLM

    torch.manual_seed(0)
    shape: Any = BASE | dict(sliding_window=window) | changes
    if letters is not None:
        shape |= dict(layer_types=[LETTERS[letter] for letter in letters], num_hidden_layers=len(letters))
    model = Lfm3ForCausalLM(Lfm3Config(**shape))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias") or ".conv.conv." in name:
            parameter.data.normal_(0, 0.4)
    model.save_pretrained(directory)
    return directory


@functools.cache
def checkpoint(shape: str) -> Path:
    """Return the checkpoint of one of SHAPES, written once per run."""
    letters, window, changes = SHAPES[shape]
    return write_lfm3(new_folder(), letters, window, **changes)

"""Lesson 15. Shared by the tests: random LFM3 checkpoints with every kind of layer, and a store for one sequence."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.families.lfm3 import FAMILY
from mini_engine.model.kinds import State, Window
from tests.support import BASE as DENSE

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
_KEEPERS: list[tempfile.TemporaryDirectory] = []


def write_lfm3(directory: Path, letters: str | None, window: int, shard_size: str = "5GB", **changes) -> Path:
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
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


@functools.cache
def checkpoint(shape: str) -> Path:
    """Return the checkpoint of one of SHAPES, written once per run."""
    keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
    letters, window, changes = SHAPES[shape]
    write_lfm3(Path(keeper.name), letters, window, **changes)
    _KEEPERS.append(keeper)  # removed when the test process ends
    return Path(keeper.name)


def load(shape: str, dtype: torch.dtype = torch.float32):
    """Load a fresh copy of a checkpoint; fast layers take a model's weights."""
    return FAMILY.load(checkpoint(shape), dtype)


@functools.cache
def hugging_face(shape: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(shape), dtype=torch.float32).eval()


class OneSequence:
    """A store of one sequence that keeps everything and forgets nothing: K, V and every convolution's inputs.

    config: says which layers have windows, and how many there are of each kind.
    """

    def __init__(self, config) -> None:
        attention = [kind for kind in config.layers if not isinstance(kind, State)]
        self.windows = [kind.size if isinstance(kind, Window) else None for kind in attention]
        self.kv: list[tuple[Tensor, Tensor] | None] = [None] * len(attention)
        self.inputs: list[Tensor | None] = [None] * (len(config.layers) - len(attention))

    def plan(self, start: int, length: int) -> SimpleNamespace:
        """Return a plan for tokens start … start + length - 1."""
        return SimpleNamespace(positions=torch.arange(start, start + length), slot_mapping=None)

    def set_kv(self, layer, slot_mapping, k, v):
        before = self.kv[layer]
        self.kv[layer] = (k, v) if before is None else (torch.cat((before[0], k)), torch.cat((before[1], v)))

    def attend(self, layer, q, meta):
        k, v = self.kv[layer]
        if self.windows[layer] is None:
            return causal_attention(q, k, v, q.shape[-1] ** -0.5)
        rows = []
        for index, query in enumerate(q):  # of each query the last W keys
            last = len(k) - len(q) + index + 1
            seen = slice(max(0, last - self.windows[layer]), last)
            rows.append(causal_attention(query[None], k[seen], v[seen], q.shape[-1] ** -0.5))
        return torch.cat(rows)

    def convolve(self, layer, x, weight, meta):
        before = self.inputs[layer]
        if before is None:
            before = x.new_zeros(weight.shape[1] - 1, x.shape[1])
        self.inputs[layer] = both = torch.cat((before, x))
        recent = both[-len(x) - weight.shape[1] + 1 :]
        return F.conv1d(recent.T[None], weight[:, None], groups=len(weight))[0].T


@torch.inference_mode()
def logits(model, ids, pieces=()):
    """Return the logits of all tokens, computed in pieces of these lengths, then one by one."""
    store, start, found = OneSequence(model.config), 0, []
    for length in (*pieces, *[1] * (len(ids) - sum(pieces))):
        found.append(model(torch.tensor(ids[start : start + length]), store, store.plan(start, length)))
        start += length
    return torch.cat(found)

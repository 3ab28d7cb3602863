"""Lesson 11. The shape of a hybrid model (Qwen3.5's text model): which layers attend, and which keep a state.

`layer_types` names every layer. Attention layers keep K and V of every token. Linear-attention layers are gated delta
nets: each keeps a matrix per value head, and the last few inputs of a short convolution, however long the text is.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from mini_engine.checkpoint.config import Qwen3Config, fields_of
from mini_engine.checkpoint.generation import end_tokens, sampling_defaults
from mini_engine.checkpoint.json_files import read_json
from mini_engine.hybrid.layer_types import LINEAR
from mini_engine.model.kinds import FULL, Full, Kind, State


@dataclass(frozen=True)
class HybridConfig(Qwen3Config):
    """The shape of a dense hybrid model. Fields have the names they have in config.json.

    rotary_dim: the dimensions of a head that RoPE rotates, `head_dim * partial_rotary_factor`; the rest pass unchanged.
    """

    model_type: ClassVar[str] = "qwen3_5_text"
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: tuple[str, ...] = ()
    rotary_dim: int = 64

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer: a delta net keeps its recurrent state in float32, and its convolution's inputs."""
        recurrent = (self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim)
        conv = (self.conv_dim, self.linear_conv_kernel_dim - 1)
        state = State(((recurrent, torch.float32), (conv, None)))
        return tuple(Full() if kind == FULL else state for kind in self.layer_types)

    @property
    def num_full_layers(self) -> int:
        """The number of layers with K and V."""
        return self.layer_types.count(FULL)

    @property
    def num_gdn_layers(self) -> int:
        """The number of layers with a state: gated delta nets."""
        return self.layer_types.count(LINEAR)

    @property
    def key_dim(self) -> int:
        """The size of all of a token's keys in a delta net, in elements: H_k * D_k."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """The size of all of a token's values in a delta net, in elements: H_v * D_v."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """The channels of the convolution, through which queries, keys and values all pass."""
        return 2 * self.key_dim + self.value_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V: 2 * H_kv * D * attention layers * itemsize."""
        return 2 * self.num_key_value_heads * self.head_dim * self.num_full_layers * dtype.itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one request's states, however long it is: recurrent in float32, conv in `dtype`."""
        recurrent = self.value_dim * self.linear_key_head_dim * torch.float32.itemsize
        conv = self.conv_dim * (self.linear_conv_kernel_dim - 1) * dtype.itemsize
        return self.num_gdn_layers * (recurrent + conv)

    @classmethod
    def from_dir(cls, directory: Path) -> "HybridConfig":
        """Read config.json of a checkpoint directory, and generation_config.json if it exists.

        Raises:
            UserError: it is not a dense hybrid text model, or a value is missing or impossible.
        """
        from mini_engine.hybrid.schema import read_hybrid, text_settings  # pydantic-core is needed only here

        path = directory / "config.json"
        text = text_settings(read_json(path), path)
        settings = read_hybrid(text, path, defaults={field.name: field.default for field in dataclasses.fields(cls)})
        settings["eos_token_ids"] = end_tokens(directory, text, settings["vocab_size"])
        settings["sampling"] = sampling_defaults(directory)
        return cls(**fields_of(cls, settings))

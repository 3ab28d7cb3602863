"""Lesson 11. The shape of a hybrid model (Qwen3.5's text model): which layers attend, and which keep a state.

`layer_types` names every layer. Attention layers keep K and V of every token. Linear-attention layers are gated delta
nets: each keeps a matrix per value head, and the last few inputs of a short convolution, however long the text is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from mini_engine.checkpoint.config import Qwen3Config
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
    def num_gdn_layers(self) -> int:
        """The number of layers with a state: gated delta nets."""
        return sum(kind != FULL for kind in self.layer_types)

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

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`. UserError also for a model with experts."""
        from mini_engine.hybrid.schema import read_hybrid  # pydantic-core is needed only here

        return read_hybrid(raw, path, defaults={field.name: field.default for field in fields(cls)})

"""Lesson 15. The shape of an LFM3: for each layer a window, all tokens, or the state of a short convolution."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import Qwen3Config, fields_of
from mini_engine.checkpoint.config_schema import (
    ANGLE_BASE,
    FLAG,
    LENGTHS,
    OBJECT,
    POSITIVE,
    SHAPE,
    check,
    check_shape,
    validator,
)
from mini_engine.checkpoint.generation import end_tokens, sampling_defaults
from mini_engine.checkpoint.json_files import read_json
from mini_engine.model.kinds import FULL, SLIDING, Full, Kind, State, Window

CONV = "conv"
ATTENTION = (FULL, SLIDING)


class Rope(NamedTuple):
    """The rotation of one type of layer.

    rope_type: "default" turns every pair of a head; "proportional" only the first `partial_rotary_factor` of them, and
        slows them down by `factor`.
    """

    rope_type: str = "default"
    rope_theta: float = 1e6
    partial_rotary_factor: float = 1.0
    factor: float = 1.0


ROPES = {FULL: dict(rope_type="proportional", partial_rotary_factor=0.5), SLIDING: dict(rope_theta=1e4)}
SETTINGS = dict(
    head_dim=s.int_schema(ge=2, le=2**16, multiple_of=2),
    norm_eps=POSITIVE,
    rms_norm_eps=POSITIVE,
    rope_parameters=OBJECT,
    layer_types=s.list_schema(s.literal_schema([*ATTENTION, CONV])),
    sliding_window=s.int_schema(ge=2),
    conv_L_cache=s.int_schema(ge=2, le=2**10),
)
FLAGS = dict.fromkeys(
    ("tie_word_embeddings", "attention_bias", "conv_bias", "use_sandwich_norm", "use_attention_gate"), FLAG
)
CONFIG = validator(SHAPE, SETTINGS | FLAGS | LENGTHS)
ROPE = validator(
    {},
    dict(
        rope_type=s.literal_schema(["default", "proportional"]),
        rope_theta=ANGLE_BASE,
        partial_rotary_factor=s.float_schema(gt=0, le=1),
        factor=POSITIVE,
    ),
)
END_TOKEN = 124_900  # the default


@dataclass(frozen=True)
class Lfm3Config(Qwen3Config):
    """The shape of a dense LFM3. Fields have the names they have in config.json.

    layer_types: "full_attention", "sliding_attention" or "conv" for each layer.
    conv_L_cache: the inputs from which a convolution computes an output, the token's own included.
    conv_channels: of a convolution: the hidden size, of which a rank has a share.
    use_sandwich_norm: what a layer adds to x is normed, too. use_attention_gate: each head's output passes a gate.
    ropes: the rotations of layers with full and with sliding attention.
    """

    model_type: ClassVar[str] = "lfm3"

    tie_word_embeddings: bool = True
    max_position_embeddings: int = 128_000
    rms_norm_eps: float = 1e-5
    layer_types: tuple[str, ...] = ()
    sliding_window: int = 256
    conv_L_cache: int = 7
    conv_bias: bool = False
    conv_channels: int = 2048
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    ropes: tuple[Rope, Rope] = (Rope(), Rope())

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        state = State((((self.conv_channels, self.conv_L_cache - 1), None),))
        kinds = {FULL: Full(), SLIDING: Window(self.sliding_window), CONV: state}
        return tuple(kinds[name] for name in self.layer_types)

    @property
    def key_dim(self) -> int:
        """The rows of each of the two gates in a convolution's input matrix, which come first in it."""
        return self.conv_channels

    @property
    def value_dim(self) -> int:
        """The rows of a convolution's inputs in that matrix, which come last."""
        return self.conv_channels

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V in the attention layers, as long as windows keep it."""
        num_layers = sum(name in ATTENTION for name in self.layer_types)
        return 2 * self.num_key_value_heads * self.head_dim * num_layers * dtype.itemsize

    @classmethod
    def from_dir(cls, directory: Path) -> "Lfm3Config":
        """Read config.json of a checkpoint directory, and generation_config.json if it exists.

        Raises:
            UserError: the model has experts or is quantized, or a value is missing or impossible.
        """
        path = directory / "config.json"
        raw = read_json(path)
        settings = read_lfm3(raw, path)
        settings["eos_token_ids"] = end_tokens(directory, {"eos_token_id": END_TOKEN} | raw, settings["vocab_size"])
        settings["sampling"] = sampling_defaults(directory)
        return cls(**fields_of(cls, settings))


def read_lfm3(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json, by the names of Lfm3Config's fields.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    if raw.get("model_type") != "lfm3":
        raise UserError(f"{path} describes a model of type {shown(raw.get('model_type'))}, not of type 'lfm3'")
    config = check_shape(CONFIG, raw, path)
    if "norm_eps" in config:
        config["rms_norm_eps"] = config["norm_eps"]
    layers = config["num_hidden_layers"]
    types = tuple(config.get("layer_types") or map(default_type, range(layers)))
    if len(types) != layers:
        raise UserError(f"{path} has {len(types)} layer_types for {layers} layers; give each layer one")
    if not set(types) & set(ATTENTION):
        raise UserError(f"{path} has no attention layer; this engine runs models that have at least one")
    if SLIDING in types and "sliding_window" in raw and raw["sliding_window"] is None:
        raise UserError(f"{path} has layers of type {SLIDING}, but no window; set sliding_window")
    ropes = tuple(read_rope(config.get("rope_parameters"), name, name in types, path) for name in ATTENTION)
    return config | {"layer_types": types, "ropes": ropes, "conv_channels": config["hidden_size"]}


def default_type(layer: int) -> str:
    """Return the type of a layer where the file names none: of every four, two convolve and two attend."""
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer > 0 else CONV


def read_rope(given: Mapping[str, Any] | None, name: str, is_used: bool, path: Path) -> Rope:
    """Return the rotation of one type of layer: each has its own settings, or the file has none at all."""
    if given is None:
        return Rope(**ROPES[name])
    if not isinstance(given.get(name), dict):
        if is_used:
            raise UserError(f"{path} is incomplete: it lacks rope_parameters.{name}")
        return Rope()
    return Rope(**check(ROPE, given[name], path, f"rope_parameters.{name}."))

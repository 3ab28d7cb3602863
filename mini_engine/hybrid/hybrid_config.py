"""Lesson 11. The shape of a hybrid model (Qwen3.5's text model): which layers attend, and which keep a state.

`layer_types` names every layer. Attention layers keep K and V of every token. Linear-attention layers are gated delta
nets: each keeps a matrix per value head, and the last few inputs of a short convolution, however long the text is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.config_schema import (
    ANGLE_BASE,
    HEADS,
    LAYERS,
    LENGTHS,
    OBJECT,
    SETTINGS,
    SHAPE,
    check,
    check_model,
    check_multiple,
    check_types,
    shown,
    validator,
)
from mini_engine.model.kinds import FULL, Full, Kind, State

LINEAR = "linear_attention"
MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
PART_OF_HEAD = 0.25  # the default share of a head's elements that RoPE rotates

HEAD_DIM = s.int_schema(ge=1, le=2**16)
TAPS = s.int_schema(ge=1, le=2**10)
ROTATION = dict(rope_theta=ANGLE_BASE, partial_rotary_factor=s.float_schema(gt=0, le=1))
DELTA_NETS = dict(
    linear_conv_kernel_dim=TAPS,
    linear_num_key_heads=HEADS,
    linear_num_value_heads=HEADS,
    linear_key_head_dim=HEAD_DIM,
    linear_value_head_dim=HEAD_DIM,
    full_attention_interval=LAYERS,
    layer_types=s.list_schema(s.literal_schema([FULL, LINEAR])),
)
CONFIG = validator(SHAPE, SETTINGS | LENGTHS | ROTATION | DELTA_NETS)
TIED = "tie_word_embeddings"
ROPE = validator({}, ROTATION)
PARTS = validator({}, dict(text_config=OBJECT))


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
        check_dense(raw, path)
        return read_hybrid(text_settings(raw, path), path)


def text_settings(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of the text model, which the file may nest in `text_config`, next to a vision tower's."""
    text = check(PARTS, raw, path).get("text_config") or {}
    if raw.get("vision_config") is not None and not text:
        raise UserError(f"{path} has a vision_config, but no text_config; lesson 11 runs the text model alone")
    settings = {"eos_token_id": raw.get("eos_token_id"), **text} if text else dict(raw)
    if raw.get(TIED) and not settings.get(TIED):  # a model with a vision tower is tied by the outer setting
        settings[TIED] = raw[TIED]
    if raw.get("quantization_config") is not None:
        settings["quantization_config"] = raw["quantization_config"]
    return settings


def check_dense(raw: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if the checkpoint has experts, or is of another family."""
    kind, where = raw.get("model_type"), path.parent
    text = check(PARTS, raw, path).get("text_config") or {}
    if "moe" in str(kind) or kind == "qwen3_next" or raw.get("num_experts") or text.get("num_experts"):
        raise UserError(f"{where} holds a mixture of experts ({shown(kind)}); lesson 11 runs only dense hybrid models")
    if kind not in MODEL_TYPES:
        raise UserError(f"{where} holds a model of type {shown(kind)}; lesson 11 runs dense 'qwen3_5_text' models")


def read_hybrid(text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings, with `rope_theta` and `rotary_dim`, and with a type for every layer.

    Defaults of settings that the file lacks are checked too, but not returned.

    Args:
        text: the settings of the text model.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    defaults = {field.name: field.default for field in fields(HybridConfig)}
    config = check_model(CONFIG, text, path) | {"eos_token_id": text.get("eos_token_id")}
    rope = read_rotation(config, path)
    config |= {"rope_theta": rope["rope_theta"], "layer_types": layer_types_of(config)}
    config["rotary_dim"] = int(config.get("head_dim", defaults["head_dim"]) * rope["partial_rotary_factor"])
    check_layers({**defaults, **config}, path)
    return {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_parameters")}


def read_rotation(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return `rope_theta` and `partial_rotary_factor` of either layout, with the same precedence as in lesson 0."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key, {})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path} uses RoPE of type {shown(kind)}; lesson 11 supports only 'default'")
    outer = {name: config[name] for name in ROTATION if name in config}
    return {"rope_theta": 10_000.0, "partial_rotary_factor": PART_OF_HEAD} | outer | check(ROPE, given, path, f"{key}.")


def layer_types_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the type of every layer that a config.json describes; by default every fourth one attends."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    interval = config.get("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(config["num_hidden_layers"]))


def check_layers(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError unless the settings fit together: heads, layers and rotated dimensions."""
    check_multiple(config, "linear_num_value_heads", "linear_num_key_heads", path)
    check_types(config["layer_types"], config, path)
    rotated = config["rotary_dim"]
    if rotated % 2 or not rotated:
        raise UserError(
            f"{path} rotates {rotated} dimensions of a head (head_dim times partial_rotary_factor); RoPE needs an even "
            "number of at least 2"
        )

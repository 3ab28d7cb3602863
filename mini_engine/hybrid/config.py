"""Lesson 11. The shape of a hybrid model (Qwen3.5's text model): which layers attend, and which keep a state.

`layer_types` names every layer. Attention layers keep K and V of every token. Linear-attention layers are gated delta
nets: each keeps a matrix per value head, and the last few inputs of a short convolution, however long the text is.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mini_engine.config import Qwen3Config, read_json
from mini_engine.errors import UserError

FULL, LINEAR = "full_attention", "linear_attention"
MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "linear_conv_kernel_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)


@dataclass(frozen=True)
class HybridConfig(Qwen3Config):
    """The shape of a dense hybrid model. Fields have the names they have in config.json.

    rotary_dim: how many dimensions of a head RoPE rotates, `head_dim * partial_rotary_factor`; the rest pass unchanged.
    """

    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: tuple[str, ...] = ()
    rotary_dim: int = 64

    @property
    def num_full_layers(self) -> int:
        """Layers with K and V."""
        return self.layer_types.count(FULL)

    @property
    def num_gdn_layers(self) -> int:
        """Layers with a state: gated delta nets."""
        return self.layer_types.count(LINEAR)

    @property
    def key_dim(self) -> int:
        """Numbers in all of a token's keys in a delta net: H_k * D_k."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Numbers in all of a token's values in a delta net: H_v * D_v."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values, which all pass through it."""
        return 2 * self.key_dim + self.value_dim

    @property
    def kv_config(self) -> Qwen3Config:
        """The shape as a KV pool sees it: only the layers with K and V."""
        return dataclasses.replace(self, num_hidden_layers=self.num_full_layers)

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
        """Read config.json of a checkpoint directory, and the end tokens of generation_config.json if it exists.

        Raises:
            UserError: it is not a dense hybrid text model, or a value is missing or impossible.
        """
        path = directory / "config.json"
        raw = text_config(read_json(path), directory)
        eos = raw.get("eos_token_id")
        if (directory / "generation_config.json").is_file():
            eos = read_json(directory / "generation_config.json").get("eos_token_id", eos)
        fields = {name: raw[name] for name in cls.__dataclass_fields__ if raw.get(name) is not None}
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in fields]:
            raise UserError(f"{path} is incomplete: it lacks {', '.join(missing)}")
        for name in POSITIVE:
            value = fields.get(name, getattr(cls, name, None))
            if type(value) is not int or value < 1:
                raise UserError(f"{path} has {name} = {value!r}; it must be a whole number of 1 or more")
        rope = rope_of(raw, directory)
        fields["rope_theta"] = rope.get("rope_theta", cls.rope_theta)
        fields["rotary_dim"] = int(fields.get("head_dim", cls.head_dim) * rope.get("partial_rotary_factor", 0.25))
        fields["layer_types"] = layer_types_of(raw)
        fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        config = cls(**fields)
        check_heads(config, path)
        return config


def text_config(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings of the text model.

    Raises:
        UserError: the checkpoint has experts or a vision tower, or is of another family.
    """
    kind = raw.get("model_type")
    text = raw.get("text_config") or {}
    if "moe" in str(kind) or kind == "qwen3_next" or raw.get("num_experts") or text.get("num_experts"):
        raise UserError(f"{directory} holds a mixture of experts ({kind!r}); lesson 11 runs only dense hybrid models")
    if kind not in MODEL_TYPES:
        raise UserError(f"{directory} holds a model of type {kind!r}; lesson 11 runs dense 'qwen3_5_text' models")
    if raw.get("vision_config") is not None:
        raise UserError(
            f"{directory} has a vision tower ('vision_config'); lesson 11 runs text models, so give a checkpoint of "
            "type 'qwen3_5_text'"
        )
    settings = {"eos_token_id": raw.get("eos_token_id"), **text} if text else raw
    if settings.get("hidden_act", "silu") != "silu":
        raise UserError(f"{directory} uses the activation {settings['hidden_act']!r}; this engine supports only 'silu'")
    return settings


def rope_of(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the RoPE settings, with `partial_rotary_factor` wherever the file has it."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            rope.setdefault(name, raw[name])
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UserError(f"{directory} uses RoPE of type {kind!r}; lesson 11 supports only 'default'")
    return rope


def layer_types_of(raw: dict[str, Any]) -> tuple[str, ...]:
    """Return the type of every layer; by default every fourth one attends."""
    if raw.get("layer_types"):
        return tuple(raw["layer_types"])
    interval = raw.get("full_attention_interval") or 4
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(raw["num_hidden_layers"]))


def check_heads(config: HybridConfig, path: Path) -> None:
    """Raise UserError unless heads divide evenly and every layer has a type that the model knows."""
    pairs = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
    for many, few in pairs:
        if getattr(config, many) % getattr(config, few):
            raise UserError(
                f"{path} has {many} = {getattr(config, many)} and {few} = {getattr(config, few)}; "
                "the first must be a multiple of the second"
            )
    if not config.num_full_layers:
        raise UserError(f"{path} has no attention layer; lesson 11 runs hybrids, which have at least one")
    if len(config.layer_types) != config.num_hidden_layers or not set(config.layer_types) <= {FULL, LINEAR}:
        raise UserError(
            f"{path} has layer_types {list(config.layer_types)} for {config.num_hidden_layers} layers; "
            f"each layer is {FULL!r} or {LINEAR!r}"
        )
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise UserError(
            f"{path} rotates {config.rotary_dim} of {config.head_dim} dimensions; RoPE needs an even number of at "
            "least 2 and at most head_dim"
        )

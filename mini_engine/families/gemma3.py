"""Lesson 15. Gemma 3: five layers with a window for each that sees everything. Of its vision tower nothing is loaded.

Beside the windows it differs from Qwen3 in six ways: embeddings are scaled by the root of their width, norms multiply
by 1 + weight, what a layer adds to x is normed, too, the feed-forward block has GELU, layers with a window rotate by
other angles, and scores are scaled by a number of the config's own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic_core import core_schema as s
from torch import Tensor, nn

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config_schema import (
    ANGLE_BASE,
    FLAG,
    LENGTHS,
    OBJECT,
    POSITIVE,
    SHAPE,
    check,
    check_model,
    check_types,
    validator,
)
from mini_engine.checkpoint.names import text_name
from mini_engine.families.family import Family
from mini_engine.families.lfm3_config import ATTENTION, Rope
from mini_engine.families.lfm3_fast import FastHeadGatedAttention, FastSandwichLayer, sandwich_finish
from mini_engine.families.lfm3_model import HeadGatedAttention, SandwichLayer, TwoRotations
from mini_engine.hybrid.fast import FastZeroCentredNorm, one_more
from mini_engine.hybrid.model import ZeroCentredRMSNorm
from mini_engine.layers import native
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.fast_model import FastMixers, with_torch_layers
from mini_engine.layers.torch_layers import Join, TorchModel
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.kinds import FULL, SLIDING
from mini_engine.model.layers import SwiGLU
from mini_engine.windows.window_config import WindowConfig

SETTINGS = dict(
    head_dim=s.int_schema(ge=2, le=2**16, multiple_of=2),
    rms_norm_eps=POSITIVE,
    query_pre_attn_scalar=POSITIVE,
    hidden_activation=s.literal_schema(["gelu_pytorch_tanh"]),
    rope_theta=ANGLE_BASE,
    rope_local_base_freq=ANGLE_BASE,
    rope_scaling=OBJECT,
    rope_parameters=OBJECT,
    layer_types=s.list_schema(s.literal_schema([*ATTENTION])),
    sliding_window=s.int_schema(ge=2),
    sliding_window_pattern=s.int_schema(ge=1),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "use_bidirectional_attention"), FLAG),
)
USUAL = dict(vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4)  # what files beside a tower leave out
TIED = "tie_word_embeddings"
PARTS = validator(dict(text_config=OBJECT), {})
CONFIG = validator(SHAPE, SETTINGS | LENGTHS)
ROPE = validator({}, dict(rope_type=s.literal_schema(["default", "linear"]), rope_theta=ANGLE_BASE, factor=POSITIVE))
THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
END_TOKEN = 1
VISION = tuple(f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))
NAMES = {  # the norms behind a mixer and behind the feed-forward block, and the one in front of the latter
    ".post_attention_layernorm.": ".post_operator_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".post_ffn_norm.",
}


@dataclass(frozen=True)
class Gemma3Config(WindowConfig):
    """The shape of a Gemma 3. Fields have the names they have in config.json.

    query_pre_attn_scalar: scores are divided by its root. ropes: the rotations of full and of sliding layers.
    """

    model_type: ClassVar[str] = "gemma3_text"

    head_dim: int = 256
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256
    ropes: tuple[Rope, Rope] = (Rope(), Rope())

    @property
    def query_scale(self) -> float:
        """The factor of queries, whose scores kernels divide by the root of head_dim."""
        return math.sqrt(self.head_dim / self.query_pre_attn_scalar)

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        return read_gemma3(raw, path)


def read_gemma3(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json, by the names of Gemma3Config's fields.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    raw = text_settings(raw, path)
    config = check_model(CONFIG, raw, path)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise UserError(f"{path} has {name} = {shown(raw[name])}, which this engine does not compute")
    every = config.pop("sliding_window_pattern", 6)
    default = [SLIDING if (layer + 1) % every else FULL for layer in range(config["num_hidden_layers"])]
    types = tuple(config.get("layer_types") or default)
    check_types(types, config, path)
    ropes = tuple(rope_of(name, config, path) for name in ATTENTION)
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    return config | {"layer_types": types, "ropes": ropes, "eos_token_id": raw.get("eos_token_id", END_TOKEN)}


def text_settings(raw: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the settings of the text model, which a file with a vision tower nests in `text_config`.

    Outside are the end tokens, whether the head is tied, and how weights are quantized.
    """
    kind = raw.get("model_type")
    if kind not in ("gemma3", "gemma3_text"):
        raise UserError(f"{path} describes a model of type {shown(kind)}, not of type 'gemma3' or 'gemma3_text'")
    if kind == "gemma3_text":
        return raw
    outer = {name: raw[name] for name in ("eos_token_id", "quantization_config") if raw.get(name) is not None}
    return USUAL | check(PARTS, raw, path)["text_config"] | outer | {TIED: bool(raw.get(TIED, True))}


def rope_of(name: str, config: Mapping[str, Any], path: Path) -> Rope:
    """Return the rotation of one type of layer; older files have one setting for each type, and stretch only one."""
    key, theta = THETAS[name]
    place = f"rope_parameters.{name}." if "rope_parameters" in config else "rope_scaling."
    given = config.get("rope_parameters", {}).get(name)
    if "rope_parameters" not in config and name == FULL:
        given = config.get("rope_scaling")
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{path} has {place[:-1]} = {shown(given)}; give an object")
    found = {"rope_theta": config.get(key, theta)} | check(ROPE, given or {}, path, place)
    kind = "proportional" if found.pop("rope_type", "default") == "linear" else "default"
    return Rope(kind, **found)


def gemma3_model(config: Gemma3Config) -> CausalLM:
    """Return the model of this shape, without weights."""
    layers = (layer_of(config, i) for i in range(config.num_hidden_layers))
    rope, scale = TwoRotations(config.ropes, config.head_dim), math.sqrt(config.hidden_size)
    return causal_lm(config, Decoder(config, rope, layers, ZeroCentredRMSNorm, scale))


def layer_of(config: Gemma3Config, layer_idx: int) -> DecoderLayer:
    """Return a decoder layer: attention, then feed-forward."""
    rotation = ATTENTION.index(config.layer_types[layer_idx])
    mixer = HeadGatedAttention(config, layer_idx, rotation, False, ZeroCentredRMSNorm, config.query_scale)
    mlp = SwiGLU(config.hidden_size, config.intermediate_size, partial(F.gelu, approximate="tanh"))
    return SandwichLayer(config, mixer, "self_attn", ZeroCentredRMSNorm, mlp)


class FastGemmaAttention(FastHeadGatedAttention):
    """Attention without its last matrix, which is `out`. Its norms of heads contain the scale of queries."""

    def __init__(self, attention: HeadGatedAttention, norm: nn.Module, matrix: Join) -> None:
        def scale(norm: ZeroCentredRMSNorm) -> Tensor:
            return one_more(norm) * (attention.scale if norm is attention.q_norm else 1.0)

        super().__init__(attention, norm, matrix, scale=scale)


FAST_MIXERS: FastMixers = {HeadGatedAttention: FastGemmaAttention}


def gemma3_decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> TorchModel:
    """Return a Gemma 3's decoder with fast layers."""
    norm = FastZeroCentredNorm
    layer, finish = partial(FastSandwichLayer, post_norm=norm), partial(sandwich_finish, post_norm=norm)
    return with_torch_layers(model, functions, exchange, FAST_MIXERS, norm, layer, finish)


def usual_name(stored: str) -> str:
    """Return a tensor's name in this model for its name in a checkpoint."""
    stored = text_name(stored)
    return next((stored.replace(own, usual) for own, usual in NAMES.items() if own in stored), stored)


FAMILY = Family(Gemma3Config.from_dir, gemma3_model, gemma3_decoder, renamed=usual_name, ignored=VISION)

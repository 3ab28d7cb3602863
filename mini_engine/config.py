"""Lesson 0. The shape of a Qwen3 model: config.json as a frozen dataclass.

Two layouts of config.json are in use: older files have `rope_theta` (and perhaps `rope_scaling`) at the top level,
files written by transformers 5 have `rope_parameters`. Both are read into the same fields.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from mini_engine.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Qwen3Config:
    """The shape of a dense Qwen3 model. Fields have the names they have in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V in all layers: 2 * H_kv * D * layers * itemsize."""
        return 2 * self.num_key_value_heads * self.head_dim * self.num_hidden_layers * dtype.itemsize

    def check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int = 0) -> None:
        """Raise UserError if this model cannot continue `prompt_ids` by `max_new_tokens` tokens."""
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        if isinstance(prompt_ids, str) or not isinstance(prompt_ids, Sequence):
            raise UserError(f"the prompt is of type {type(prompt_ids).__name__}; give a list of token ids")
        if not prompt_ids:
            raise UserError("the prompt is empty; give at least one token")
        strays = [t for t in prompt_ids if not (isinstance(t, (int, Integral)) and 0 <= t < self.vocab_size)]
        if strays:
            raise UserError(f"token id {strays[0]} is not in the vocabulary; ids run from 0 to {self.vocab_size - 1}")
        wanted = len(prompt_ids) + max_new_tokens
        if wanted > self.max_position_embeddings:
            raise UserError(
                f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones need {wanted} positions; "
                f"the model has {self.max_position_embeddings}, so shorten the prompt or ask for fewer tokens"
            )

    @classmethod
    def from_dir(cls, directory: Path) -> "Qwen3Config":
        """Read config.json of a checkpoint directory, and the end tokens of generation_config.json if it exists."""
        raw = read_json(directory / "config.json")
        _check_supported(raw, directory)
        eos = raw.get("eos_token_id")
        if (directory / "generation_config.json").is_file():
            eos = read_json(directory / "generation_config.json").get("eos_token_id", eos)
        fields = {name: raw[name] for name in cls.__dataclass_fields__ if raw.get(name) is not None}
        fields["rope_theta"] = _rope(raw).get("rope_theta", cls.rope_theta)
        fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        if missing := [
            field.name for field in dataclasses.fields(cls) if is_required(field) and field.name not in fields
        ]:
            raise UserError(f"{directory / 'config.json'} is incomplete: it lacks {', '.join(missing)}")
        config = cls(**fields)
        _check_numbers(config, directory / "config.json")
        return config


def is_required(field: dataclasses.Field) -> bool:
    """Return whether a field has no default."""
    return field.default is dataclasses.MISSING


def read_json(path: Path) -> dict:
    """Return the JSON object in `path`; raise a UserError that names the file if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a checkpoint directory has one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def _rope(raw: dict) -> dict:
    """Return the RoPE settings of either layout as one dict with `rope_type` and perhaps `rope_theta`."""
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if raw.get("rope_theta") is not None:
        rope.setdefault("rope_theta", raw["rope_theta"])
    return rope


def _check_supported(raw: dict, directory: Path) -> None:
    model_type = raw.get("model_type")
    if model_type != "qwen3":
        raise UserError(f"{directory} holds a model of type {model_type!r}; this engine runs only dense 'qwen3' models")
    rope_type = _rope(raw)["rope_type"]
    if rope_type != "default":
        raise UserError(f"{directory} uses RoPE of type {rope_type!r}; this engine supports only 'default'")
    if raw.get("use_sliding_window"):
        raise UserError(f"{directory} uses sliding-window attention; this engine always attends to the whole history")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{directory} uses the activation {raw['hidden_act']!r}; this engine supports only 'silu'")


def _check_numbers(config: Qwen3Config, path: Path) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise UserError(f"{path} has {name} = {value!r}; it must be a whole number of 1 or more")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{path} has {config.num_attention_heads} query heads on {config.num_key_value_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise UserError(f"{path} has head_dim = {config.head_dim}; RoPE rotates pairs, so it must be even")

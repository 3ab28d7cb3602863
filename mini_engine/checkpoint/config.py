"""Lesson 0. The shape of a Qwen3 model: config.json as a frozen dataclass.

Two layouts of config.json are in use: older files have `rope_theta` (and perhaps `rope_scaling`) at the top level,
files written by transformers 5 have `rope_parameters`. Both are read into the same fields. `config_schema` says what
the files may hold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from mini_engine.base.errors import TooLong, UserError, warn_once
from mini_engine.base.values import shown
from mini_engine.checkpoint.generation import end_tokens, sampling_defaults
from mini_engine.checkpoint.json_files import read_json
from mini_engine.model.kinds import Full, Kind, attending

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RopeScaling:
    """The stretching of RoPE beyond the context that a model was trained with. Fields as in config.json.

    rope_type: "default" (not at all), "linear", "dynamic", "yarn" or "llama3"; `model/rope.py` has the formulas.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def sharpness(self, mscale: float) -> float:
        """Return how much "yarn" sharpens attention over a context `factor` times as long; its paper's mscale is 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Qwen3Config:
    """The shape of a dense Qwen3 model. Fields have the names they have in config.json.

    model_type: of the family, as in config.json.
    sampling: parameters of generation_config.json for requests that leave them out; lessons 6 and 7 use them.
    """

    model_type: ClassVar[str] = "qwen3"

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
    rope_scaling: RopeScaling = RopeScaling()
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer: what it keeps of a text. Here every layer keeps K and V of every token."""
        return (Full(),) * self.num_hidden_layers

    @property
    def trained_length(self) -> int:
        """The context, in tokens, that the model was trained with before RoPE was stretched."""
        return self.rope_scaling.original_max_position_embeddings or self.max_position_embeddings

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens. "linear" and "yarn" multiply the trained length, as in vLLM.

        "dynamic" does not: beyond its trained length every step would rotate new keys by other angles than the keys in
        the cache, so an answer would depend on how its prompt was cut into steps.
        """
        stretched = self.rope_scaling.rope_type in ("linear", "yarn")
        reach = int(self.trained_length * self.rope_scaling.factor) if stretched else 0
        return max(self.max_position_embeddings, reach)

    @property
    def k_shape(self) -> tuple[int, int]:
        """The shape of a token's row in a pool's K, in each layer: `(H_kv, D)`."""
        return self.num_key_value_heads, self.head_dim

    @property
    def v_shape(self) -> tuple[int, int]:
        """The shape of a token's row in a pool's V, in each layer; with latents it differs from `k_shape`."""
        return self.k_shape

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V in all layers that attend: 2 * H_kv * D * layers * itemsize."""
        return (math.prod(self.k_shape) + math.prod(self.v_shape)) * len(attending(self.layers)) * dtype.itemsize

    def check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int = 0) -> None:
        """Raise UserError if this model cannot continue `prompt_ids` by `max_new_tokens` tokens: TooLong for length."""
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        if isinstance(prompt_ids, str) or not isinstance(prompt_ids, Sequence):
            raise UserError(f"the prompt is of type {type(prompt_ids).__name__}; give a list of token ids")
        if not prompt_ids:
            raise UserError("the prompt is empty; give at least one token")
        strays = [t for t in prompt_ids if not (isinstance(t, (int, Integral)) and 0 <= t < self.vocab_size)]
        if strays:
            raise UserError(
                f"token id {shown(strays[0])} is not in the vocabulary; ids run from 0 to {self.vocab_size - 1}"
            )
        wanted = len(prompt_ids) + max_new_tokens
        if wanted > self.max_model_len:
            beyond = " and cannot use dynamic RoPE beyond them" if self.rope_scaling.rope_type == "dynamic" else ""
            raise TooLong(
                f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones need {wanted} positions; "
                f"the model has {self.max_model_len}{beyond}, so shorten the prompt or ask for fewer tokens"
            )

    @classmethod
    def from_dir(cls, directory: Path) -> Self:
        """Read config.json of a checkpoint directory, and generation_config.json if it exists.

        As in transformers, a generation_config.json replaces the end tokens of config.json even if it names none. An
        end token outside the vocabulary can never be sampled: a warning, not an error.

        Raises:
            UserError: a file is missing or malformed, or describes a model that cannot run here.
        """
        return cls(**fields_of(cls, read_settings(directory, cls.read)))

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the validated settings of a config.json, by the names of this class's fields.

        Settings of RoPE are in either layout. `eos_token_id` is among them only where the file's own does not count.

        Raises:
            UserError: a setting is missing or impossible, or describes a model of another family.
        """
        from mini_engine.checkpoint.config_schema import read_config  # pydantic-core is needed only here

        return read_config(raw, path)


def read_settings(directory: Path, read: Callable[[dict, Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the shape that the files of a checkpoint directory describe; `read` is that of a config's class."""
    from mini_engine.checkpoint.config_schema import read_rope

    path = directory / "config.json"
    raw = read_json(path)
    settings = read(raw, path)
    rope = read_rope(settings, path)
    _warn_of_lost_theta(settings, rope, path)
    return settings | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": RopeScaling(**fields_of(RopeScaling, rope)),
        "eos_token_ids": end_tokens(directory, raw | settings, settings["vocab_size"]),
        "sampling": sampling_defaults(directory),
    }


def fields_of(cls: type, values: dict) -> dict:
    """Return the entries of `values` that are fields of a dataclass."""
    return {name: value for name, value in values.items() if name in cls.__dataclass_fields__}


def _warn_of_lost_theta(settings: dict, rope: dict, path: Path) -> None:
    """Warn if `rope_scaling` replaces `rope_parameters` with another rope_theta, as it does in transformers."""
    theta = settings.get("rope_parameters", {}).get("rope_theta")
    if settings.get("rope_scaling") and theta not in (None, rope["rope_theta"]):
        warn_once(
            f"{path}: rope_scaling replaces rope_parameters, as in transformers, so rope_theta is "
            f"{rope['rope_theta']:g}; to use the other one, put it into rope_scaling"
        )

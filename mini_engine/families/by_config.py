"""Course machinery. Shapes of models that this engine does not run, as far as their caches need them.

What a layer keeps follows from the public config.json: experts, vision towers and quantized weights do not change it.
Only types whose layers are known are read; for any other, a number would be a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config, fields_of
from mini_engine.checkpoint.config_schema import HEADS, LAYERS, LENGTHS, WINDOW, check, check_types, validator
from mini_engine.checkpoint.config_schema import layer_types as types_of_qwen
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.model.kinds import FULL, SLIDING
from mini_engine.windows.window_config import WindowConfig

LINEAR = "linear_attention"
SIZE = s.int_schema(ge=1, le=2**16)
SIZES = ("head_dim", "kv_lora_rank", "qk_rope_head_dim")
DELTA_NETS = ("conv_kernel_dim", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
SCHEMA = validator(
    dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS),
    dict.fromkeys([*SIZES, *(f"linear_{name}" for name in DELTA_NETS)], SIZE)
    | dict(num_key_value_heads=HEADS, hidden_size=s.int_schema(ge=1, le=2**24))
    | dict(sliding_window_pattern=LAYERS, full_attention_interval=LAYERS)
    | dict(layer_types=s.list_schema(s.literal_schema([FULL, SLIDING, LINEAR])))
    | LENGTHS
    | WINDOW,
)
UNUSED: dict[str, Any] = dict(vocab_size=1, hidden_size=1, intermediate_size=1)  # a cache does not depend on them


@dataclass(frozen=True)
class Rule:
    """How a type's config.json is read.

    kind: the class of its shape. others: the type of layers that do not see everything.
    every: where the file has no `layer_types`, the last of so many layers sees everything; None: every layer does.
    defaults: transformers' values for settings that the file lacks.
    """

    kind: type[Qwen3Config] = WindowConfig
    others: str = SLIDING
    every: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


GEMMA_3 = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096)
FULL_RULE, LATENTS, HYBRID = Rule(), Rule(LatentConfig), Rule(HybridConfig, LINEAR, 4, dict(head_dim=256))
KNOWN = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), FULL_RULE),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), HYBRID),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "youtu", "youtu_llm", "minicpm3"), LATENTS),
    "gemma3_text": Rule(every=6, defaults=GEMMA_3),
    "gpt_oss": Rule(every=2, defaults=dict(head_dim=64, num_key_value_heads=8, sliding_window=128)),
    "olmo3": Rule(every=4, defaults=dict(sliding_window=4096)),
}


def shape_by_config(raw: Mapping[str, Any], path: Path) -> Qwen3Config | None:
    """Return a shape whose layers and heads are those of a config.json; None: the type is not known here.

    A model with a vision tower has the shape of its text model.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    text = raw.get("text_config")
    text = text if isinstance(text, dict) else raw
    kind = text.get("model_type")
    rule = KNOWN.get(kind) if isinstance(kind, str) else None
    if rule is None:
        return None
    given = {name: value for name, value in text.items() if value is not None}
    config = check(SCHEMA, {**rule.defaults, **given}, path)
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if rule.kind is LatentConfig:
        check_latents(config, path)
    else:
        config["head_dim"] = head_dim_of(config, path)
        config["layer_types"] = tuple(config.get("layer_types") or default_types(config, rule))
        check_types(config["layer_types"], config, path)
        if SLIDING in config["layer_types"] and "sliding_window" not in config:
            raise UserError(f"{path} has layers of type {SLIDING}, but no window; set sliding_window")
    fields: dict[str, Any] = fields_of(rule.kind, config) | UNUSED
    return rule.kind(**fields)


def default_types(config: dict[str, Any], rule: Rule) -> list[str]:
    """Return the type of each layer where the file has no list."""
    if rule.every is None:
        return types_of_qwen(config)
    every = config.get("full_attention_interval", config.get("sliding_window_pattern", rule.every))
    return [rule.others if (layer + 1) % every else FULL for layer in range(config["num_hidden_layers"])]


def head_dim_of(config: Mapping[str, Any], path: Path) -> int:
    """Return the width of a head, by default the hidden size over the number of query heads."""
    if "head_dim" in config:
        return config["head_dim"]
    size, heads = config.get("hidden_size", 0), config["num_attention_heads"]
    if size < heads or size % heads:
        raise UserError(f"{path} has neither head_dim nor a hidden_size that is a multiple of {heads} heads; set one")
    return size // heads


def check_latents(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError unless the settings say how large a latent and its rotary key are."""
    if missing := [name for name in ("kv_lora_rank", "qk_rope_head_dim") if name not in config]:
        raise UserError(f"{path} is incomplete: it lacks {', '.join(missing)}")

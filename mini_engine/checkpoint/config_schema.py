"""Lesson 0. The schemas of a checkpoint's JSON files: config.json, the end tokens, and the index of the shards.

The validator is pydantic's core. Its schemas are written as function calls, because importing pydantic's classes would
take a tenth of the engine's start-up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from pydantic_core import SchemaValidator, ValidationError
from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError, warn_once
from mini_engine.base.values import shown
from mini_engine.model.kinds import FULL, SLIDING

WIDTH = s.int_schema(ge=1, le=2**24)  # far beyond any model, and a product of three still fits torch's sizes
HEADS = s.int_schema(ge=1, le=2**16)
LAYERS = s.int_schema(ge=1, le=2**20)
POSITIONS = s.int_schema(ge=1, le=2**31 - 1)
POSITIVE = s.float_schema(gt=0, le=1e6, allow_inf_nan=False)  # larger values overflow somewhere in float32
FROM_ZERO = s.float_schema(ge=0, allow_inf_nan=False)
ANGLE_BASE = s.float_schema(gt=1, allow_inf_nan=False)
WHOLE_HEAD = s.float_schema(ge=1, le=1)  # Qwen3 rotates every element of a head
FLAG = s.bool_schema()
OBJECT = s.dict_schema()
TOKEN_IDS = s.union_schema(
    [s.int_schema(), s.list_schema(s.int_schema())],
    custom_error_type="token_ids",
    custom_error_message="Input should be a token id or a list of token ids",
)


def validator(required: Mapping[str, s.CoreSchema], optional: Mapping[str, s.CoreSchema]) -> SchemaValidator:
    """Return a validator for JSON objects. Its result has only the keys named here."""
    fields = {name: s.typed_dict_field(schema, required=True) for name, schema in required.items()}
    fields |= {name: s.typed_dict_field(schema, required=False) for name, schema in optional.items()}
    return SchemaValidator(s.typed_dict_schema(fields, extra_behavior="ignore"))


SHAPE = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), WIDTH)
SHAPE |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS)
LENGTHS = dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), POSITIONS)
ROTATION = dict(rope_theta=ANGLE_BASE, partial_rotary_factor=WHOLE_HEAD)
WINDOW = dict(use_sliding_window=FLAG, sliding_window=s.int_schema(), max_window_layers=s.int_schema())
SETTINGS = dict(
    head_dim=s.int_schema(ge=2, le=2**16, multiple_of=2),  # RoPE rotates pairs
    rms_norm_eps=POSITIVE,
    hidden_act=s.literal_schema(["silu"]),
    tie_word_embeddings=FLAG,
    attention_bias=FLAG,
    rope_scaling=OBJECT,
    rope_parameters=OBJECT,
    layer_types=s.list_schema(s.str_schema()),
)
CONFIG = validator(SHAPE, SETTINGS | LENGTHS | ROTATION | WINDOW)

TRAINED = dict(original_max_position_embeddings=POSITIONS)
ATTENTION = dict(attention_factor=POSITIVE, mscale=FROM_ZERO, mscale_all_dim=FROM_ZERO)
RAMP = dict(beta_fast=POSITIVE, beta_slow=POSITIVE, truncate=FLAG)
BANDS = dict(low_freq_factor=POSITIVE, high_freq_factor=POSITIVE)
ROPE_FIELDS: dict[str, tuple[dict, dict]] = {  # required, optional
    "default": ({}, ROTATION),
    "linear": (dict(factor=POSITIVE), ROTATION),
    "dynamic": (dict(factor=POSITIVE), ROTATION),
    "yarn": (dict(factor=POSITIVE), ROTATION | TRAINED | ATTENTION | RAMP),
    "llama3": (dict(factor=POSITIVE) | BANDS, ROTATION | TRAINED),
}
ROPE = {kind: validator(*fields) for kind, fields in ROPE_FIELDS.items()}
TRAINED_ELSEWHERE = ("yarn", "llama3")  # these may be configured with the length after stretching
END_TOKENS = validator({}, dict(eos_token_id=TOKEN_IDS))
SAMPLING = validator(
    {},
    dict(
        temperature=s.float_schema(ge=0, le=100, allow_inf_nan=False),
        top_k=s.int_schema(ge=-1),
        top_p=s.float_schema(ge=0, le=1),
        min_p=s.float_schema(ge=0, le=1),
        repetition_penalty=s.float_schema(ge=0.01, le=100),
        max_new_tokens=s.int_schema(ge=1),
    ),
)
INDEX = validator(dict(weight_map=s.dict_schema(s.str_schema(), s.str_schema(min_length=1, max_length=255))), {})


def read_config(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json; UserError if malformed or for another kind of model."""
    config = read_shape(raw, path)
    if other := next((kind for kind in layer_types(raw) if kind != FULL), None):
        raise UserError(
            f"{path} has layers of type {shown(other)}, and lesson 0's model attends to the whole history in every "
            "layer; LLM and mini-engine run every kind of layer that the course has"
        )
    return config


def read_shape(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of a dense Qwen3 model, whatever its layers see."""
    if raw.get("model_type") != "qwen3":
        raise UserError(
            f"{path} describes a model of type {shown(raw.get('model_type'))}, and lesson 0's model is of type "
            "'qwen3'; LLM and mini-engine run every family that the course has"
        )
    return check_model(CONFIG, raw, path)


def check_model(schema: SchemaValidator, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Validate the settings of a model that attends, as `check` does; weights must not be quantized."""
    if raw.get("quantization_config") is not None:
        raise UserError(
            f"{path} has a quantization_config; this engine runs only weights that are not quantized: fetch the "
            "checkpoint that this one was made from, whose name has no GPTQ, AWQ, FP8 or the like"
        )
    config = check(schema, raw, path)
    check_multiple(config, "num_attention_heads", "num_key_value_heads", path)
    return config


def check_multiple(config: Mapping[str, Any], many: str, few: str, path: Path) -> None:
    """Raise UserError unless the first of two numbers of heads is a multiple of the second, or the second is absent."""
    if few in config and config[many] % config[few]:
        raise UserError(
            f"{path} has {many} = {config[many]} and {few} = {config[few]}; the first must be a multiple of the second"
        )


def check_types(types: Sequence[str], config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError unless there is a type for each layer, and one of them attends."""
    if len(types) != config["num_hidden_layers"]:
        raise UserError(
            f"{path} has {len(types)} layer_types for {config['num_hidden_layers']} layers; give each layer one"
        )
    if not {FULL, SLIDING} & set(types):
        raise UserError(f"{path} has no attention layer; this engine runs models that have at least one")


def layer_types(raw: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer. Without a list, windows slide from layer `max_window_layers` on, unless null."""
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    slides = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    num_layers, first = raw["num_hidden_layers"], raw.get("max_window_layers", 28)
    return [SLIDING if slides and layer >= first else FULL for layer in range(num_layers)]


def read_rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated RoPE settings of either layout, with `rope_type` and perhaps `rope_theta`.

    As in transformers, a `rope_scaling` that is not empty replaces `rope_parameters` as a whole, and a `rope_theta` at
    the top level counts only if the chosen object has none; `original_max_position_embeddings` there always counts.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key, {})
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        raise UserError(f"{path} uses RoPE of type {shown(kind)}; this engine supports {', '.join(ROPE)}")
    if nested := next((name for name, value in given.items() if isinstance(value, dict)), None):
        raise UserError(f"{path} has separate RoPE settings for {shown(nested)}; all layers must share one set")
    known = {"rope_type", "type"}.union(*ROPE_FIELDS[kind])
    if unknown := [name for name, value in given.items() if name not in known and value is not None]:
        warn_once(f"{path} has {key}.{unknown[0]}, which RoPE of type {kind!r} does not have; it is ignored")
    settings = {"rope_theta": config.get("rope_theta", 10_000.0)} | check(ROPE[kind], given, path, f"{key}.")
    if kind in TRAINED_ELSEWHERE and "original_max_position_embeddings" in config:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return settings | {"rope_type": kind}


def read_end_tokens(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Return the `eos_token_id` of config.json or generation_config.json: none, one, or several."""
    ids = check(END_TOKENS, raw, path).get("eos_token_id", [])
    return (ids,) if isinstance(ids, int) else tuple(ids)


def read_weight_map(raw: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the file of each tensor; UserError for a file outside the index's own directory."""
    files = check(INDEX, raw, path)["weight_map"]
    for name, file in files.items():
        if PurePosixPath(file).is_absolute() or PureWindowsPath(file).anchor or ".." in PureWindowsPath(file).parts:
            raise UserError(f"{path} places {shown(name)} in {shown(file)}, outside the checkpoint's directory")
    return files


def check(schema: SchemaValidator, raw: Mapping[str, Any], path: Path, parent: str = "") -> dict[str, Any]:
    """Validate an object, in which null means absent; UserError names the first mistake.

    parent: the place of the object in the file, with a dot, if it is not the whole file.
    """
    try:
        return schema.validate_python({k: v for k, v in raw.items() if v is not None}, strict=True)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
    if missing := [parent + ".".join(map(str, m["loc"])) for m in mistakes if m["type"] == "missing"]:
        raise UserError(f"{path} is incomplete: it lacks {', '.join(missing)}")
    first = mistakes[0]
    where, value = parent + ".".join(map(str, first["loc"])), shown(first["input"])
    raise UserError(f"{path} has {where} = {value}; it {first['msg'].split(' ', 1)[1]}")

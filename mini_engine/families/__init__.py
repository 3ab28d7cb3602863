"""Course machinery. The families of models that run here, found by the `model_type` of config.json.

A family is one file, imported when it is met, so an engine needs only its own family's lessons. No other module asks
for a family's name.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.families.family import Family

FILES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "youtu": "deepseek",
    "youtu_llm": "deepseek",
    "lfm3": "lfm3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
}
RELATIVES = {"qwen3_5": "qwen3_5", "qwen3_next": "qwen3_5", "deepseek_v": "deepseek"}  # by how their types begin


def family_named(model_type: str) -> Family:
    """Return the family with this `model_type`, one of FILES."""
    return _in_file(FILES[model_type])


def family_of(raw: Mapping[str, Any], path: Path) -> Family:
    """Return the family that reads a config.json, or that can say why it does not.

    Raises:
        UserError: the model is of none of these families.
    """
    kind = str(raw.get("model_type"))
    file = FILES.get(kind) or next((file for start, file in RELATIVES.items() if kind.startswith(start)), None)
    if file is None:
        what, runs = shown(raw.get("model_type")), ", ".join(map(repr, FILES))
        raise UserError(f"{path} describes a model of type {what}; this engine runs models of type {runs}")
    return _in_file(file)


def _in_file(name: str) -> Family:
    return import_module(f"{__name__}.{name}").FAMILY

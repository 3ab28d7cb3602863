"""Lesson 11. The two types of a hybrid's layers, by their names in config.json."""

from collections.abc import Mapping
from typing import Any

from mini_engine.model.kinds import FULL

LINEAR = "linear_attention"


def layer_types_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the type of every layer that a config.json describes; by default every fourth one attends."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    interval = config.get("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(config["num_hidden_layers"]))

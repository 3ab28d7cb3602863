"""Lesson 15. The shape of a Qwen3 model with windows: which layers see everything, and which only the last W tokens."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mini_engine.checkpoint.config import Qwen3Config, fields_of, read_settings
from mini_engine.model.kinds import SLIDING, Full, Kind, Window


@dataclass(frozen=True)
class WindowConfig(Qwen3Config):
    """The shape of a dense Qwen3 model with windows. Fields have the names they have in config.json.

    layer_types: "full_attention" or "sliding_attention" for each layer, in any order.
    sliding_window: the number of tokens a query of a sliding layer sees, its own included; at least 2.
    """

    layer_types: tuple[str, ...] = ()
    sliding_window: int = 4096

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer: a window, or everything."""
        return tuple(Window(self.sliding_window) if kind == SLIDING else Full() for kind in self.layer_types)

    @classmethod
    def from_dir(cls, directory: Path) -> "WindowConfig":
        """Read config.json of a checkpoint directory, and generation_config.json if it exists.

        Raises:
            UserError: a file is missing or malformed, or describes a model that cannot run here.
        """
        from mini_engine.windows.schema import read_windows  # pydantic-core is needed only here

        return cls(**fields_of(cls, read_settings(directory, read_windows)))

    @classmethod
    def of(cls, config: Qwen3Config, layer_types: tuple[str, ...], sliding_window: int) -> "WindowConfig":
        """Return another model's shape with windows in some of its layers."""
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(Qwen3Config)}
        return cls(**fields, layer_types=layer_types, sliding_window=sliding_window)

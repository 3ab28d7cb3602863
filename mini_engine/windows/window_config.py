"""Lesson 15. The shape of a Qwen3 model with windows: which layers see everything, and which only the last W tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.checkpoint.config import Qwen3Config
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
    def read(cls, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `Qwen3Config.read`."""
        from mini_engine.windows.schema import read_windows  # pydantic-core is needed only here

        return read_windows(raw, path)

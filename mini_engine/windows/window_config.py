"""Lesson 15. The shape of a Qwen3 model with windows: which layers see everything, and which only the last W tokens.

config.json is validated with the same rules as transformers 5's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.config_schema import check_types, layer_types, read_shape
from mini_engine.model.kinds import FULL, SLIDING, Full, Kind, Window

DEFAULT_WINDOW = 4096  # transformers' default if the file has none


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
        return read_windows(raw, path)


def read_windows(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of config.json; UserError if malformed or for another kind of model."""
    settings = read_shape(raw, path)
    types = tuple(layer_types(raw))
    if other := next((kind for kind in types if kind not in (FULL, SLIDING)), None):
        raise UserError(f"{path} has layers of type {shown(other)}; this engine runs {FULL} and {SLIDING}")
    check_types(types, settings, path)
    if SLIDING not in types:
        raise UserError(f"{path} has no layers with a window, which lesson 15 needs; use another lesson's script")
    if not raw.get("use_sliding_window") or raw.get("sliding_window", DEFAULT_WINDOW) is None:
        raise UserError(
            f"{path} has layers of type {SLIDING}, but no window; set use_sliding_window and sliding_window"
        )
    window = settings.get("sliding_window", DEFAULT_WINDOW)
    if window < 2:
        raise UserError(
            f"{path} has sliding_window = {window}; give 2 or more, since a query that sees only itself is useless"
        )
    return settings | {"layer_types": types, "sliding_window": window}

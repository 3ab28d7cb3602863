"""Lesson 15. Validates the windows of a config.json, with the same rules as transformers 5."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config_schema import check_types, layer_types, read_shape
from mini_engine.model.kinds import FULL, SLIDING

DEFAULT_WINDOW = 4096  # transformers' default if the file has none


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

"""Lesson 0. Reads a checkpoint's JSON files; every failure is a one-sentence UserError."""

import json
from pathlib import Path

from mini_engine.base.errors import UserError


def read_json(path: Path) -> dict:
    """Return the JSON object in `path`. UserError, which names the file, if it cannot be read as one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a checkpoint directory has one") from None
    except RecursionError:
        raise UserError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data

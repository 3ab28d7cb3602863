"""Lesson 0. Reads generation_config.json: the tokens that end answers, and suggested sampling parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError, warn_once
from mini_engine.base.values import shown
from mini_engine.checkpoint.json_files import read_json

FILE = "generation_config.json"


def end_tokens(directory: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens in the vocabulary; warn about others, or if there are none. raw: config.json's fields."""
    from mini_engine.checkpoint.config_schema import read_end_tokens

    path, other = directory / "config.json", directory / FILE
    ids = read_end_tokens(raw, path)
    if other.is_file():
        replaced, path = ids, other
        ids = read_end_tokens(read_json(other), other)
        if replaced and not ids:
            warn_once(f"{other} names no eos_token_id, so answers end only at max_tokens, as in transformers")
    known = tuple(token for token in ids if 0 <= token < vocab_size)
    if strays := [shown(token) for token in ids if token not in known]:
        warn_once(
            f"{path} has eos_token_id {strays[0]}, which is outside the vocabulary of {vocab_size}; it is ignored"
        )
    return known


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Return the authors' sampling parameters, by lesson 4's names; values out of range are left out, with a warning.

    `max_tokens` is `max_new_tokens` in the file. Without a file, there are none.
    """
    path = directory / FILE
    if not path.is_file():
        return {}
    from mini_engine.checkpoint.config_schema import SAMPLING, check

    raw, found = read_json(path), {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"):
        try:
            found |= check(SAMPLING, {name: raw.get(name)}, path)
        except UserError as error:
            warn_once(f"{error}; it is ignored")
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])  # -1 is off too
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found

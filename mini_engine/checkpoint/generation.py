"""Lesson 0. What generation_config.json says of a model: the tokens that end its answers, and how to sample them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mini_engine.checkpoint.json_files import read_json
from mini_engine.errors import UserError, warn_once
from mini_engine.values import shown

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """How the checkpoint's authors would sample, by the names of lesson 4's parameters; None where they do not say.

    max_tokens: `max_new_tokens` in the file.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_DEFAULTS = SamplingDefaults()


def end_tokens(directory: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens that are in the vocabulary, and warn of what is missing. raw: config.json's settings."""
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
            f"{path} has eos_token_id {strays[0]}, which is not in the vocabulary of {vocab_size} and never comes"
        )
    return known


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return what the file suggests, if there is one. A value that is out of range is left out, with a warning."""
    path = directory / FILE
    if not path.is_file():
        return NO_DEFAULTS
    from mini_engine.checkpoint.config_schema import read_sampling

    raw, found = read_json(path), {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"):
        try:
            found |= read_sampling({name: raw.get(name)}, path)
        except UserError as error:
            warn_once(f"{error}; it is left out")
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])  # -1 is off, too
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return SamplingDefaults(**found)

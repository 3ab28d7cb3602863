"""Lesson 6. Tokens that a checkpoint declares outside tokenizer.json: special tokens and added ones.

In current checkpoints tokenizer.json and tokenizer_config.json are complete. Older ones also have
special_tokens_map.json and added_tokens.json, which count if tokenizer_config.json lists no tokens, as in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.json_files import read_json

LISTED = "added_tokens_decoder"  # id to token, with its flags
EXTRA = "extra_special_tokens"
FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the names of special tokens that older checkpoints have in other files."""
    config, older = _read(directory / "tokenizer_config.json"), _read(directory / "special_tokens_map.json")
    if LISTED in config:
        return config
    extra, more = config.get(EXTRA), older.get(EXTRA)
    together = {EXTRA: extra + more} if isinstance(extra, list) and isinstance(more, list) else {}
    return {**config, **older, **together}


def special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the config's special tokens: those with a name, such as `eos_token`, and the others."""
    extra = config.get(EXTRA) or config.get("additional_special_tokens") or []
    named = {name: entry for name, entry in config.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        named, extra = named | extra, []
    if not isinstance(extra, list):
        raise UserError(f"tokenizer_config.json has extra special tokens of type {type(extra).__name__}; give a list")
    texts = {name: _text_of(entry) for name, entry in named.items()}
    return {name: text for name, text in texts.items() if text}, [text for text in map(_text_of, extra) if text]


def added_tokens(directory: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens that are listed outside tokenizer.json, in the order of their ids."""
    listed = config.get(LISTED)
    try:
        if isinstance(listed, dict):
            return [_token(listed[index]) for index in sorted(listed, key=int)]
        ids = _read(directory / "added_tokens.json")
        texts = sorted(ids, key=lambda text: int(ids[text]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory} lists added tokens that cannot be read ({error!r}); give ids and texts") from None
    return [AddedToken(text) for text in texts]


def _token(entry: Any) -> AddedToken:
    return AddedToken(entry["content"], **{flag: entry[flag] for flag in FLAGS if flag in entry})


def _text_of(entry: Any) -> str | None:
    """Return a special token's text: older files have it as a string, or in an object with settings."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}

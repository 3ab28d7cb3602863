"""Lesson 13. The keys of a prompt's blocks, by which a router knows them."""

import hashlib
import json
from array import array
from collections.abc import Hashable, Sequence

from mini_engine.kv.radix_node import TOKEN_BYTES
from mini_engine.tiers.keys import chain


def block_keys(prompt_ids: Sequence[int], namespace: Hashable, block_size: int) -> list[bytes]:
    """Return a key for each whole block of a prompt; it stands for the block's tokens and all before them (lesson 12).

    A prompt with invalid token ids has no keys: the replica will refuse it.
    """
    root = hashlib.sha256(json.dumps([type(namespace).__name__, namespace]).encode()).digest()
    try:
        tokens = array("I", prompt_ids).tobytes()
    except (OverflowError, TypeError):
        return []
    return list(chain(root, tokens, TOKEN_BYTES * block_size))

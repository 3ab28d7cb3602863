"""Lesson 12. Keys of stored blocks: a chain of digests that names the model, the namespace and every token before.

    root = sha256(identity, namespace);  key of block i = sha256(key of block i - 1, tokens of block i)

Two requests have the same key only if one model would compute the same K and V for both, so a key needs no lookup of
what it stands for. A record stores its tokens nevertheless, and they are compared.
"""

import hashlib
import json
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

KEY_BYTES = 32
LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Identity:
    """Everything besides the tokens that decides the bytes of a block.

    weights, config: sha256 digests, in hex. kv_dtype: the pool's, such as "bfloat16".
    block_size: slots in a block. layout: the version of a payload's layout. The tokenizer is not here: K and V follow
    from token ids, whatever text these stand for.
    """

    weights: str
    config: str
    kv_dtype: str
    block_size: int
    layout: int = LAYOUT_VERSION

    def root(self, namespace: Hashable = None) -> bytes:
        """Return the key that a chain starts from: a digest of all fields and the namespace, which are kept apart.

        Raises:
            TypeError: the namespace is neither None nor a string or integer, so it has no bytes to hash.
        """
        if namespace is not None and not isinstance(namespace, str | int):
            raise TypeError(f"namespace {namespace!r} cannot be part of a key; use a string, an integer or None")
        text = json.dumps([asdict(self), type(namespace).__name__, namespace], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


def chain(parent: bytes, tokens: bytes | memoryview, width: int) -> Iterator[bytes]:
    """Yield the key of each whole block of `tokens`, which is `width` bytes wide, behind the block called `parent`."""
    view = memoryview(tokens)
    for start in range(0, len(view) - width + 1, width):
        parent = hashlib.sha256(parent + view[start : start + width]).digest()
        yield parent


def config_digest(config: Any) -> str:
    """Return the sha256 of a model's configuration, a dataclass. How to sample has no part in K and V."""
    shape = {name: value for name, value in asdict(config).items() if name != "sampling"}
    return hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()

"""Lesson 18. The memory of a rank other than rank 0: its shares of the pools, which follow rank 0's orders."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Memory:
    """A rank's pools.

    model: the rank's share of the model.
    pools: its shares of lesson 3's pool, `kv`, and of lesson 11's, `states`, if the model has states.
    store: the store that its model reads and writes: the KV pool, until rank 0 orders another one over the pools.
    """

    model: Any
    pools: dict[str, Any] = field(default_factory=dict)
    store: Any = None

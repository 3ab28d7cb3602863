"""Lesson 20. Batches of events as bytes, as vLLM publishes them, so that existing subscribers read them: msgpack.

    [ts, [event, …], data_parallel_rank, publisher_id]

Until its version 0.23, vLLM wrote an event as an array of its fields behind its name, as SGLang 0.5.23 does; since then
it writes a map, with the name as "type". Both are written here, and both are read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from mini_engine.agents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, short_hash
from mini_engine.base.errors import UserError

MEDIUM = "GPU"  # vLLM's name for the pool that the model reads, on a CPU as well
FIELDS = {  # in the order of an array; newer fields are optional
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
FORMATS = ("map", "array")
NEEDED = (
    "events of the prefix cache need the extra 'events': pip install \"kv-course[events]\"; "
    'in a clone, pip install -e ".[events]"'
)


@cache
def libraries() -> tuple[ModuleType, ModuleType]:
    """Return zmq and msgspec.msgpack. UserError if one is not installed."""
    try:
        import msgspec.msgpack
        import zmq
    except ModuleNotFoundError as error:
        raise UserError(f"{NEEDED} ({error.name} is missing)", param="kv_events") from None
    return zmq, msgspec.msgpack


def encode(batch: EventBatch, form: str = "map") -> bytes:
    """Return a batch as bytes. form: "map", or "array" for subscribers of vLLM before its version 0.24."""
    write: Callable[[Event], Any] = as_map if form == "map" else as_array
    events = [write(event) for event in batch.events]
    return libraries()[1].encode([batch.ts, events, batch.data_parallel_rank, batch.publisher_id])


def as_map(event: Event) -> dict[str, Any]:
    """Return an event as a map from field names, its own name included."""
    name = type(event).__name__
    rest = {"lora_id": None, "medium": MEDIUM, "lora_name": None}
    return {"type": name} | {field: getattr(event, field, rest.get(field)) for field in FIELDS[name]}


def as_array(event: Event) -> list[Any]:
    """Return an event as its name and the values of its fields."""
    return list(as_map(event).values())


def decode(payload: bytes) -> EventBatch:
    """Return the batch that a publisher has sent, of this engine or of another one. Unknown events are left out.

    Raises:
        ValueError: the bytes are no such batch.
    """
    try:
        ts, events, *rest = libraries()[1].decode(payload)
        found = [event for raw in events if (event := event_of(raw)) is not None]
        rank, publisher, *_ = *rest, None, None
        return EventBatch(float(ts), found, rank, publisher)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(f"{len(payload)} bytes are no batch of events: {error}") from None


def event_of(raw: Mapping[str, Any] | Sequence[Any]) -> Event | None:
    """Return an event from a map or an array; None if its name is unknown."""
    name = raw["type"] if isinstance(raw, Mapping) else raw[0]
    if name not in FIELDS:
        return None
    fields = raw if isinstance(raw, Mapping) else dict(zip(FIELDS[name], raw[1:], strict=False))
    if name == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = [hash_of(one) for one in fields["block_hashes"]]
    if name == "BlockRemoved":
        return BlockRemoved(hashes)
    parent = fields["parent_block_hash"]
    before = None if parent is None else hash_of(parent)
    return BlockStored(hashes, before, fields["token_ids"], fields["block_size"])


def hash_of(raw: int | bytes) -> int:
    """Return a block's hash as an integer. vLLM publishes whole keys with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return short_hash(raw) if isinstance(raw, bytes) else int(raw)

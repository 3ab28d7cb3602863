"""Lesson 11. Divides the memory of a model with states between blocks, working slots and checkpoints."""

from typing import NamedTuple

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.kv.manager import blocks_in_budget

MOST_CHECKPOINTS = 4  # per request that may run
INTERVAL = 256  # tokens between two checkpoints, by default


class Slots(NamedTuple):
    """State slots: for running requests, and for checkpoints."""

    working: int
    track: int


def sizes_of(state_bytes: int, config: EngineConfig, bytes_per_token: int, budget: int) -> tuple[int, Slots]:
    """Return the blocks of the KV pool, the null block included, and state slots, for at most half of the memory.

    With `num_blocks`, states come on top.

    Args:
        state_bytes: of one slot. bytes_per_token: of K and V. budget: bytes for all of them.

    Raises:
        UserError: the memory is too small.
    """
    seqs, spare = config.max_num_seqs, config.max_drafts
    num_blocks, slots = config.num_blocks, Slots(seqs + spare, seqs)
    if num_blocks is None:
        slots = slots_in_budget(budget // 2, state_bytes, seqs, spare)
        used = (1 + slots.working + slots.track) * state_bytes
        num_blocks = blocks_in_budget(budget - used, bytes_per_token, config.block_size)
    track = slots.track if config.max_track_slots is None else config.max_track_slots
    return num_blocks, slots._replace(track=track if config.enable_prefix_caching else 0)


def slots_in_budget(budget_bytes: int, bytes_per_slot: int, max_num_seqs: int, num_spare: int = 0) -> Slots:
    """Divide a budget into slots: half for running requests, up to max_num_seqs, and the rest for checkpoints.

    Args:
        num_spare: working slots for drafts, which are reserved first.

    Raises:
        UserError: not even the padding slot, those for drafts and one request fit.
    """
    count = budget_bytes // bytes_per_slot - 1 - num_spare  # without the padding slot
    if count < 1:
        least = "two" if not num_spare else str(2 + num_spare)
        raise UserError(
            f"{least} state slots of {bytes_per_slot} bytes do not fit in {budget_bytes}, half of the memory for K "
            "and V; give more",
            param="kv_bytes",
        )
    seqs = min(max_num_seqs, (count + 1) // 2)
    return Slots(seqs + num_spare, min(count - seqs, MOST_CHECKPOINTS * max_num_seqs))


def interval_of(config: EngineConfig) -> int:
    """Return the tokens between two checkpoints: whole blocks, by default about `INTERVAL`."""
    return config.checkpoint_interval or max(1, INTERVAL // config.block_size) * config.block_size

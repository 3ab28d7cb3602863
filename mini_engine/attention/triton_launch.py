"""Lesson 3. How the Triton kernel's work is cut into programs, from shapes alone; imports neither torch nor Triton."""

from typing import NamedTuple

MIN_SPLIT = 512  # keys; shorter histories are not worth a second kernel
MAX_SPLITS = 32
MIN_TILE = 16  # rows and columns; tl.dot takes no fewer
ROW_BYTES = 512  # a query, key or value head of this size still leaves room for 64 rows in shared memory
KEY_BYTES = 16384  # shared memory for the keys of one turn of the loop, and as much for their values


class LaunchConfig(NamedTuple):
    """The grid is `[tiles, kv_heads, splits]`; each program attends with a tile of queries to one split of the keys.

    width: head_dim, rounded up to a power of two.
    rows: of a tile; each of its queries takes one for every query head that shares the key/value head.
    keys: loaded at once, in one turn of a program's loop.
    split: keys that one program walks; with one split, all that a row of the block table can hold.
    splits: programs that share a tile's history; more than one need a second kernel to merge their results.
    tiles: the most that this many rows and sequences can need; a few programs may find nothing to do.
    """

    width: int
    rows: int
    keys: int
    split: int
    splits: int
    tiles: int

    @property
    def needs_merge(self) -> bool:
        """Whether programs write partial results."""
        return self.splits > 1

    @property
    def padded_splits(self) -> int:
        """`splits` rounded up to a power of two, as Triton's vectors are."""
        return power_of_2(self.splits)


def launch_config(
    *, num_rows: int, num_seqs: int, group: int, dim: int, element_bytes: int, reach: int
) -> LaunchConfig:
    """Choose the tiles and splits for one call. Lengths stay on the GPU, so they follow from shapes alone.

    Args:
        num_rows: rows of q, at least 1.
        num_seqs: sequences, at least 1. No more rows than sequences is a batch of decodes: it has too few tiles to fill
            a GPU, so the history is split. Prompts have tiles enough.
        group: query heads that share a key/value head.
        dim: elements of a head, `element_bytes` each.
        reach: the most keys that a row of the block table can hold.
    """
    is_decode = num_rows <= num_seqs
    width = power_of_2(dim)
    head_bytes = width * element_bytes
    most_rows = 64 if head_bytes <= ROW_BYTES else 32
    rows = max(MIN_TILE if is_decode else most_rows, power_of_2(group))
    keys = max(MIN_TILE, min(64, KEY_BYTES // head_bytes))
    split, splits = reach, 1
    if is_decode and reach > MIN_SPLIT:
        split = max(MIN_SPLIT, power_of_2(-(-reach // MAX_SPLITS)))
        splits = -(-reach // split)
    return LaunchConfig(width, rows, keys, split, splits, tiles=num_rows // (rows // group) + num_seqs)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()

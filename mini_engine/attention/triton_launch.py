"""Lesson 3. Cuts the Triton kernel's work into programs, from shapes alone; imports neither torch nor Triton."""

from typing import NamedTuple

MIN_SPLIT = 256  # keys; 4,096 keys of 8 heads are then 128 programs, and an H100 has 132 multiprocessors
MAX_SPLITS = 32
MIN_TILE = 16  # rows and columns; the smallest that tl.dot takes


class LaunchConfig(NamedTuple):
    """The grid is `[tiles + num_seqs * (splits - 1), kv_heads]`.

    The first programs attend with a tile of queries each. The others share the history of a decode with its tile: a
    sequence of one query is cut into at most `splits` parts, by its own length, which the host does not know.

    width: head_dim, rounded up to a power of two that tl.dot takes.
    rows: of a tile; each of its queries takes one for every query head that shares the key/value head.
    keys: loaded at once, in one turn of a program's loop.
    warps: of a program; more of them share a tile's registers.
    tiles: the most that these rows and sequences can need; a few programs may have nothing to do.
    splits: with more than one, a second kernel merges their results.
    """

    width: int
    rows: int
    keys: int
    warps: int
    tiles: int
    splits: int

    @property
    def needs_merge(self) -> bool:
        """True if programs write partial results."""
        return self.splits > 1

    @property
    def padded_splits(self) -> int:
        """`splits` rounded up to a power of two, as Triton's vectors are."""
        return power_of_2(self.splits)


def launch_config(
    *, num_rows: int, num_seqs: int, group: int, dim: int, reach: int, tensor_cores: bool
) -> LaunchConfig:
    """Choose the tiles and splits for one call. Lengths stay on the GPU, so they follow from shapes alone.

    `python scripts/bench.py compiled` shows what the compiler makes of each choice: no tile may need more registers
    than a thread has.

    Args:
        num_rows: rows of q, at least 1.
        num_seqs: sequences, at least 1. With no more rows than sequences, this is a batch of decodes: small tiles.
        group: query heads that share a key/value head.
        dim: elements of a head.
        reach: the most keys that a query can see: the capacity of a row of the block table, or the window.
        tensor_cores: True if they multiply numbers of this dtype. Without them a product is unrolled into single
            multiplications, all in registers, so tiles are smaller.
    """
    is_decode = num_rows <= num_seqs
    width = max(MIN_TILE, power_of_2(dim))
    most_rows, most_keys = (64, 64) if tensor_cores else (32, 16)
    if width > 128:
        most_rows //= 2
    rows = max(MIN_TILE if is_decode else most_rows, power_of_2(group))
    keys = max(MIN_TILE, min(most_keys, 128 * most_keys // width))
    warps = 4 if is_decode and tensor_cores else 8
    splits = min(MAX_SPLITS, -(-max(reach, 1) // MIN_SPLIT))
    return LaunchConfig(width, rows, keys, warps, tiles=num_rows // (rows // group) + num_seqs, splits=splits)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()

"""Lesson 12. Compaction: moves blocks to the front of the pool, so that it can shrink.

Paged memory never needs this to allocate, because any free block serves. It gives memory back.
"""

from collections.abc import Iterator
from typing import cast

from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.radix_node import Node
from mini_engine.kv.refcount import RefCountedAllocator


def moves(held: set[int]) -> dict[int, int]:
    """Return the moves, old block to new, that make `held` 1 … len(held): as few as possible."""
    end = NULL_BLOCK + len(held)
    holes = (block for block in range(NULL_BLOCK + 1, end + 1) if block not in held)
    return {block: next(holes) for block in sorted(held) if block > end}


def compact(manager: KvCacheManager) -> int:
    """Move the blocks that requests and the tree hold to the pool's front. Call it between two steps.

    Returns:
        how many blocks were moved. The pool needs no more than its first `1 + len(held)` blocks now.
    """
    allocator = cast(RefCountedAllocator, manager.allocator)  # lesson 8's cache has one
    with allocator.mutex:
        moved = moves(allocator.held)
        manager.coordinator.copy(list(moved), list(moved.values()))
        for table in manager.tables.values():
            for index, block in enumerate(table.blocks):
                table.blocks[index] = table.row[index] = moved.get(block, block)
        for node in nodes(cache_of(manager).prefixes.tree.root):
            node.blocks = [moved.get(block, block) for block in node.blocks]
        for old, new in moved.items():
            allocator.counts[new], allocator.counts[old] = allocator.counts[old], 0
        allocator.held = {moved.get(block, block) for block in allocator.held}
        end = NULL_BLOCK + len(allocator.held)
        allocator.free_blocks = list(range(allocator.num_blocks - 1, end, -1))
    return len(moved)


def shrink(manager: KvCacheManager, pool: KvPool, num_blocks: int) -> None:
    """Compact, then give back the memory of all blocks from `num_blocks` on, one layer after another.

    Raises:
        ValueError: `num_blocks` is more than the pool has, or fewer than are held. Nothing was changed.
    """
    allocator = cast(RefCountedAllocator, manager.allocator)
    if not 1 + len(allocator.held) <= num_blocks <= allocator.num_blocks:
        raise ValueError(
            f"the pool cannot have {num_blocks} blocks: it has {allocator.num_blocks}, of which {len(allocator.held)} "
            "are held, and the null block"
        )
    compact(manager)
    for layers in (pool.K, pool.V):
        for index, layer in enumerate(layers):
            layers[index] = layer[:num_blocks].clone()
    allocator.num_blocks = num_blocks
    allocator.free_blocks = [block for block in allocator.free_blocks if block < num_blocks]
    del allocator.counts[num_blocks:]


def nodes(root: Node) -> Iterator[Node]:
    """Yield every node below `root`."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()

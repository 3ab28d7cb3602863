"""Lesson 15. Plans a step for a model with windows: lesson 5's plan, and the tables of the window groups."""

from collections.abc import Callable, Sequence

from torch import Tensor

from mini_engine.engine.runner import padded_table
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.windows.store import GroupedMeta, with_groups
from mini_engine.windows.window_table import WindowTable

TablesOf = Callable[[str], WindowTable]


def add_tables(tables_of: TablesOf, num_groups: int, meta: ForwardMeta, chunks: Sequence[Chunk]) -> GroupedMeta:
    """Add the tables of the window groups to the plan of a step of these chunks.

    Args:
        tables_of: returns a running request's WindowTable by its id (`WindowMemory`).
        num_groups: of groups with windows.
    """
    groups = window_tables(chunks, tables_of, num_groups)
    return with_groups(meta, [group.to(meta.block_table.device) for group in groups])


def window_tables(chunks: Sequence[Chunk], tables_of: TablesOf, num_groups: int) -> list[Tensor]:
    """Return the chunks' tables for each window group, `[S, max_blocks]` int32 on the host."""
    tables = [tables_of(chunk.request.id) for chunk in chunks] if num_groups else []
    return [padded_table([table.rows[group] for table in tables]) for group in range(num_groups)]

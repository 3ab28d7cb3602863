"""Lesson 15. Plans a step for a model with windows, lesson 10's captured ones too: its plan and the groups' tables."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.engine.runner import padded_table
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.staging import Table
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


class GroupRows:
    """The slots and tables of all groups, group 0 included, in one tensor each.

    A padding row writes slot 0 and has null blocks in every group, as in lesson 10's own buffers.

    Args:
        tables_of: returns a running request's WindowTable by its id. num_groups: of groups with windows.
    """

    def __init__(self, tables_of: TablesOf, num_groups: int) -> None:
        self.tables_of, self.num_groups = tables_of, num_groups

    def tables(self, max_rows: int, max_blocks: int) -> list[Table]:
        """Return the shapes of the slots `[G, max_rows]` int64 and of the tables `[G, max_rows, max_blocks]` int32."""
        num_groups = 1 + self.num_groups
        return [Table((num_groups, max_rows), torch.int64), Table((num_groups, max_rows, max_blocks), torch.int32)]

    def fill(self, tensors: Sequence[Tensor], chunks: Sequence[Chunk], meta: ForwardMeta, size: int) -> None:
        """Copy in slots and tables. Columns past the step's own may keep stale entries; holes never do."""
        slot_mapping, block_table = tensors
        plan = with_groups(meta, window_tables(chunks, self.tables_of, self.num_groups))
        spare = (0, size - len(chunks))
        slot_mapping[:, :size].copy_(F.pad(plan.slot_mapping, spare))
        block_table[:, :size, : plan.block_table.shape[2]].copy_(F.pad(plan.block_table, (0, 0, *spare)))

    def complete(self, meta: ForwardMeta, tensors: Sequence[Tensor], size: int) -> GroupedMeta:
        """Replace group 0's slots and table with those of all groups."""
        slot_mapping, block_table = tensors
        tables = dict(slot_mapping=slot_mapping[:, :size], block_table=block_table[:, :size])
        return GroupedMeta(**dict(vars(meta), **tables))

"""Lesson 15. Plans a step for a model with windows: lesson 5's plan, and the tables of the window groups."""

from collections.abc import Callable, Sequence

import torch

from mini_engine.engine.runner import Plan, Step, padded_table, plan_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.windows.store import with_groups
from mini_engine.windows.window_table import WindowTable


class WindowPlan:
    """Plans a step, and adds the tables of the window groups.

    Args:
        tables_of: returns a running request's WindowTable by its id (`WindowMemory`).
        num_groups: of groups with windows.
        plan: plans the step itself, as lesson 5 does.
    """

    def __init__(self, tables_of: Callable[[str], WindowTable], num_groups: int, plan: Plan = plan_rows) -> None:
        self.tables_of, self.num_groups, self.plan = tables_of, num_groups, plan

    def __call__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Step:
        """Return the plan, on `device`."""
        step = self.plan(chunks, block_size, device)
        groups = window_tables(chunks, self.tables_of, self.num_groups)
        return step._replace(meta=with_groups(step.meta, [group.to(device) for group in groups]))


def window_tables(
    chunks: Sequence[Chunk], tables_of: Callable[[str], WindowTable], num_groups: int
) -> list[torch.Tensor]:
    """Return the chunks' tables for each window group, `[S, max_blocks]` int32 on the host."""
    tables = [tables_of(chunk.request.id) for chunk in chunks] if num_groups else []
    return [padded_table([table.rows[group] for table in tables]) for group in range(num_groups)]


def same_in_all(num_groups: int, plan: Plan = plan_rows) -> Plan:
    """Return a planner for a pool that no request uses yet: every group has the blocks of group 0."""

    def with_the_same(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Step:
        step = plan(chunks, block_size, device)
        return step._replace(meta=with_groups(step.meta, [step.meta.block_table] * num_groups))

    return with_the_same

"""Lesson 11. Runs a step's chunks through a hybrid model: lesson 5's plan, and the state slot of every request."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from mini_engine.engine.runner import ModelRunner, Step, int64, plan_step, with_prompt_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.hybrid.model import HybridForCausalLM
from mini_engine.hybrid.store import HybridKv, HybridMeta, Run
from mini_engine.kv.block_tensor import ForwardMeta


class HybridRunner(ModelRunner):
    """Runs the model over chunks. `slot_of` names a running request's state slot, by request id."""

    def __init__(self, model: HybridForCausalLM, pool: HybridKv, slot_of: Callable[[str], int]) -> None:
        self.model, self.pool, self.slot_of = model, pool, slot_of
        self.block_size = pool.K[0].shape[1]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """As in lesson 5."""
        step = self.plan(chunks, self.pool.device)
        return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)

    def plan(self, chunks: Sequence[Chunk], device: torch.device) -> Step:
        """Return lesson 5's plan with the state slots, on `device`."""
        step = with_prompt_rows(plan_step(chunks, self.block_size, device), chunks)
        slots = [self.slot_of(chunk.request.id) for chunk in chunks]
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        return step._replace(meta=with_states(step.meta, slots, lengths))


def with_states(meta: ForwardMeta, slots: Sequence[int], lengths: Sequence[int]) -> HybridMeta:
    """Add each sequence's state slot to a plan. `lengths` are the tokens that each sequence feeds."""
    rows, singles, runs, start = [], [], [], 0
    for slot, length in zip(slots, lengths, strict=True):
        if length == 1:
            rows.append(start)
            singles.append(slot)
        else:
            runs.append(Run(start, start + length, slot))
        start += length
    device = meta.positions.device
    single_rows = tensor(rows, device) if runs else None
    return HybridMeta(**shallow(meta), single_rows=single_rows, single_slots=tensor(singles, device), runs=tuple(runs))


def tensor(values: list[int], device: torch.device) -> Tensor:
    """Return `values` as int64 on the device."""
    return int64(values).to(device) if values else torch.zeros(0, dtype=torch.int64, device=device)


def shallow(meta: ForwardMeta) -> dict:
    """Return the plan's fields as they are; `dataclasses.asdict` would copy every tensor."""
    return {field.name: getattr(meta, field.name) for field in fields(ForwardMeta)}

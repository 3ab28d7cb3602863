"""Lesson 10. A decode loop on the device: tokens, lengths and tables stay there, and the host only replays steps.

Every request gets the slots for its whole answer at the start, so no step needs the allocator. Each step reads its
tokens where the previous one left them, and nothing is copied to or from the host until all answers are complete:

    lengths + 1 -> plan from the table -> model -> argmax -> into token_ids and answers

That is one graph, replayed once per token. It cannot do what the engine exists for: admit requests, stop early, sample.
An answer with a stop token is still computed to its full length and cut afterwards.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lessons.l10_device.req_to_token import PADDING_ROW, ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.engine.runner import Step
from mini_engine.gpu.graphs import Capture, no_graph
from mini_engine.gpu.staging import upload
from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.model.causal_lm import CausalLM


class RowMemory:
    """Memory that a model needs for each row of the table, in addition to K and V. By default there is none."""

    def check(self, num_rows: int) -> None:
        """Raise UserError unless there is room for this many rows."""

    def begin(self, row: int) -> None:
        """Prepare a row that is being handed out."""

    def complete(self, meta: ForwardMeta, rows: Tensor, lengths: Sequence[int] | None) -> ForwardMeta:
        """Return a plan with the inputs of this memory.

        Args:
            rows: `[S]` int64, the row of each sequence. lengths: the number of tokens that each feeds; None: one each.
        """
        return meta


@dataclass(frozen=True)
class DeviceKv:
    """This lesson's storage: row and position -> slot -> K and V.

    store: what the model reads and writes, over the pool's blocks; None: these blocks themselves.

    Raises:
        UserError: the sizes of allocator and pool, or of table and memory, do not match.
    """

    table: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    pool: SlotPool
    store: Any = None
    memory: RowMemory = field(default_factory=RowMemory)

    def __post_init__(self) -> None:
        if self.allocator.page_size != self.pool.page_size or self.allocator.size > self.pool.size:
            raise UserError(
                f"the allocator has {self.allocator.size} slots in pages of {self.allocator.page_size} and the pool "
                f"{self.pool.size} in pages of {self.pool.page_size}; use the same for both"
            )
        self.memory.check(self.table.max_reqs)

    def take(self, length: int) -> int:
        """Allocate a row, and slots for `length` tokens, rounded up to whole pages. Return the row.

        Raises:
            OutOfBlocks: no row or too few slots are free; nothing was changed.
            UserError: `length` is longer than a row.
        """
        if self.whole(length) > self.table.max_context_len:
            raise UserError(
                f"{length} tokens do not fit a row of {self.table.max_context_len}; use fewer tokens or a longer table"
            )
        [row] = self.table.alloc(1)
        try:
            self.table.write(row, 0, self.allocator.alloc(self.whole(length)))
        except OutOfBlocks:
            self.table.free(row)
            raise
        self.memory.begin(row)
        return row

    def give_back(self, row: int, length: int) -> None:
        """Free the row and its slots."""
        self.allocator.free(self.table.read(row, self.whole(length)))
        self.table.free(row)

    def whole(self, length: int) -> int:
        """Return the number of slots in the pages that `length` tokens need."""
        return -(-length // self.allocator.page_size) * self.allocator.page_size

    @contextmanager
    def hold(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Hold a row for each length within the `with` block; free all of them at its end, even after an error."""
        rows: list[int] = []
        try:
            for length in lengths:
                rows.append(self.take(length))
            yield rows
        finally:
            with self.allocator.free_group():
                for row, length in zip(rows, lengths, strict=False):
                    self.give_back(row, length)


class DecodeState:
    """The state that a captured step changes. Until `begin`, every row is padding, so the step can run as a warm-up.

    token_ids: `[S]` int64, each request's newest token. seq_lens_kv: `[S]` int32, the number of tokens before it.
    rows: `[S]` int64, the request's row in the table.
    answers: `[S, max_new_tokens]` int64. step: `[1]` int64, the number of columns of `answers` already written.
    """

    def __init__(self, num_rows: int, max_new_tokens: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.rows = torch.full_like(self.token_ids, PADDING_ROW)
        self.seq_lens_kv = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.answers = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, rows: Tensor, prompt_lens: Tensor) -> None:
        """Set the state to just after the prompts, before the first token is chosen. Both are `[S]`, on the device."""
        self.rows.copy_(rows)
        self.seq_lens_kv.copy_(prompt_lens)
        self.step.zero_()

    def take(self, logits: Tensor) -> None:
        """Choose each row's most likely token, append it to the answer, and make it the next step's input."""
        self.token_ids.copy_(logits.argmax(-1))
        self.answers.index_copy_(1, self.step, self.token_ids[:, None])
        self.step += 1


def plan_prefill(kv: DeviceKv, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> tuple[Step, Tensor]:
    """Plan one step over all prompts, packed one after the other; their slots are in the table.

    The plan is built on the host and goes to the device in one copy. Also returns `rows` on the device, `[S]` int64.
    """
    size, lengths = kv.allocator.page_size, [len(prompt_ids) for prompt_ids in prompts]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    on_host = [
        torch.tensor([token for prompt_ids in prompts for token in prompt_ids]),
        ends[1:] - 1,
        torch.cat([torch.arange(length) for length in lengths]),
        ends.int(),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(rows),
    ]
    token_ids, last_rows, positions, cu_seqlens_q, seq_lens_kv, row_ids = upload(on_host, kv.pool.device)
    slots = [kv.table.read(row, length) for row, length in zip(rows, lengths, strict=True)]
    table = kv.table.block_table(row_ids, size)
    meta = ForwardMeta(positions, torch.cat(slots).long(), cu_seqlens_q, seq_lens_kv, table, size)
    return Step(token_ids, kv.memory.complete(meta, row_ids, lengths), last_rows), row_ids


@torch.inference_mode()
def generate_on_device(
    model: CausalLM,
    kv: DeviceKv,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    capture: Capture = no_graph,
) -> list[list[int]]:
    """Continue all prompts greedily, in one batch.

    Returns:
        the new tokens of each prompt: at most `max_new_tokens`, up to and including a token of `stop_ids`.

    Raises:
        UserError: a prompt is invalid for this model, or does not fit a row of the table.
        OutOfBlocks: the prompts do not all fit at once. In both cases nothing has run and nothing is held.
    """
    for prompt_ids in prompts:
        model.config.check_prompt(prompt_ids, max_new_tokens)
    if not prompts or not max_new_tokens:
        return [[] for _ in prompts]
    lengths = [len(prompt_ids) for prompt_ids in prompts]
    state, store = DecodeState(len(prompts), max_new_tokens, kv.pool.device), kv.store or kv.pool.blocks

    def decode() -> None:
        state.seq_lens_kv += 1
        meta = kv.table.plan_decode(state.rows, state.seq_lens_kv, kv.allocator.page_size)
        state.take(model(state.token_ids, store, kv.memory.complete(meta, state.rows, None)))

    with kv.hold([length + max_new_tokens - 1 for length in lengths]) as rows:
        replay = capture(decode)
        step, row_ids = plan_prefill(kv, rows, prompts)
        state.begin(row_ids, step.meta.seq_lens_kv)
        state.take(model(step.token_ids, store, step.meta, rows=step.rows))
        for _ in range(max_new_tokens - 1):
            replay()
    return [_until_stop(answer, stop_ids) for answer in state.answers.tolist()]


def _until_stop(token_ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """Cut an answer after its first stop token."""
    stop = next((i for i, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return token_ids[: stop + 1]

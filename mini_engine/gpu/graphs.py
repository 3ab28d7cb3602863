"""Lesson 10. Decode steps that are recorded once and replayed: one launch where there were hundreds.

A decode step of a small model is some hundred kernels of a few microseconds each, and to launch one takes the host as
long. A CUDA graph records the launches once; to replay it is one call. But it records *addresses and numbers*: where
each tensor lay, and how many rows there were. So

- everything that a step reads or writes lies in buffers that never move, and a step begins with copies into them;
- there is a graph for each of a ladder of batch sizes, and a batch is filled up to the next size with padding rows:
  no query, no keys, and a slot of the null block to write into;
- whatever looks at a value (`.tolist()`, `.item()`, an `if` on a tensor) cannot be recorded, so the kernel must not.

Prefill and mixed steps run as before: their shapes never repeat, and they keep the device busy without help.

The recording itself is behind `Capture`. With `no_graph` the very same padded path runs on any machine, and that is
what the tests do; `CudaCapture` needs a GPU, and has not been run on one. The ladder and the pool of memory that its
graphs share are as in vLLM (Kwon et al., 2023).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.engine.runner import ModelRunner, Step, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.errors import UserError
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM

CPU = torch.device("cpu")
CAPTURE_STEP = 8  # rows between two capture_sizes, from 8 on: a step carries at most 7 rows of padding

Replay = Callable[[], None]


class Capture(Protocol):
    """Records what `work` does to tensors that stay where they are; calling what it returns does it again."""

    def __call__(self, work: Callable[[], None]) -> Replay: ...


def no_graph(work: Callable[[], None]) -> Replay:
    """The capture that records nothing: to replay is to run."""
    return work


class CudaCapture:
    """Records CUDA graphs, which all use one pool of memory, since only one of them ever runs at a time."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Run `work` once, for the sake of all that a first call makes (compiled kernels, workspaces); then record."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            work()
        return graph.replay


def capture_sizes_up_to(max_rows: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, 8, then every 8th, and max_rows itself.

    Raises:
        UserError: max_rows is not at least 1.
    """
    if max_rows < 1:
        raise UserError(f"max_rows is {max_rows}; a ladder of batch sizes needs at least 1")
    capture_sizes = chain((1, 2, 4), range(CAPTURE_STEP, max_rows, CAPTURE_STEP))
    return [size for size in capture_sizes if size < max_rows] + [max_rows]


class DecodeBuffers:
    """What captured steps read and write. The tensors are made once; every size uses their first rows.

    token_ids, positions, slot_mapping: `[max_rows]` int64.
    cu_seqlens_q: `[max_rows + 1]` int32. seq_lens_kv: `[max_rows]` int32. block_table: `[max_rows, max_blocks]` int32.
    logits: `[max_rows, vocab_size]`.

    At first all rows are padding. `dtype` is the logits'.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, block_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_size = block_size
        self.token_ids = zeros(max_rows, dtype=torch.int64)
        self.positions = zeros(max_rows, dtype=torch.int64)
        self.slot_mapping = zeros(max_rows, dtype=torch.int64)
        self.cu_seqlens_q = zeros(max_rows + 1, dtype=torch.int32)
        self.seq_lens_kv = zeros(max_rows, dtype=torch.int32)
        self.block_table = zeros(max_rows, max_blocks, dtype=torch.int32)
        self.logits = zeros(max_rows, vocab_size, dtype=dtype)

    def meta(self, size: int) -> ForwardMeta:
        """The first `size` rows as a plan: views, at the same addresses at every call."""
        return ForwardMeta(
            positions=self.positions[:size],
            slot_mapping=self.slot_mapping[:size],
            cu_seqlens_q=self.cu_seqlens_q[: size + 1],
            seq_lens_kv=self.seq_lens_kv[:size],
            block_table=self.block_table[:size],
            block_size=self.block_size,
        )

    def fill(self, step: Step, size: int) -> None:
        """Copy a decode step of at most `size` rows in, and make the rows after it padding.

        Columns of block_table past the step's own keep what they held: no kernel looks behind a sequence's end.
        """
        meta, count = step.meta, len(step.token_ids)
        spare = (0, size - count)
        self.token_ids[:size].copy_(F.pad(step.token_ids, spare))
        self.positions[:size].copy_(F.pad(meta.positions, spare))
        self.slot_mapping[:size].copy_(F.pad(meta.slot_mapping, spare))
        self.cu_seqlens_q[: size + 1].copy_(F.pad(meta.cu_seqlens_q, spare, value=count))
        self.seq_lens_kv[:size].copy_(F.pad(meta.seq_lens_kv, spare))
        self.block_table[:size, : meta.block_table.shape[1]].copy_(F.pad(meta.block_table, (0, 0, *spare)))


class GraphRunner(ModelRunner):
    """Lesson 5's runner, whose decode steps are replayed. Everything is captured when it is made, largest size first:
    the smaller ones then find memory in the pool.

    Args:
        max_rows: the most requests that decode in one step, the scheduler's max_num_seqs.
        capture: `CudaCapture()` for a GPU; `no_graph` runs the padded path as it is, anywhere.
    """

    def __init__(self, model: Qwen3ForCausalLM, pool: KvPool, max_rows: int, capture: Capture) -> None:
        super().__init__(model, pool)
        max_blocks = min(pool.num_blocks - 1, -(-model.config.max_position_embeddings // self.block_size))
        self.buffers = DecodeBuffers(
            max_rows, max_blocks, self.block_size, model.config.vocab_size, model.dtype, model.device
        )
        self.capture_sizes = capture_sizes_up_to(max_rows)
        self.replays = self.capture_all(capture)

    @torch.inference_mode()
    def capture_all(self, capture: Capture) -> dict[int, Replay]:
        """A replay for each size. While they are recorded all rows are padding, and only the null block is written."""
        return {size: capture(self.decode_of(size)) for size in reversed(self.capture_sizes)}

    def decode_of(self, size: int) -> Callable[[], None]:
        """A forward pass over the first `size` rows of the buffers, and back into them."""
        buffers = self.buffers

        def decode() -> None:
            logits = self.model(buffers.token_ids[:size], self.pool, buffers.meta(size))
            buffers.logits[:size].copy_(logits)

        return decode

    def is_decode(self, chunks: Sequence[Chunk]) -> bool:
        """Every chunk is one token that chooses the next, and there is a size for so many."""
        return len(chunks) <= self.capture_sizes[-1] and all(
            chunk.stop - chunk.start == 1 and chunk.samples for chunk in chunks
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """One forward pass, as in lesson 5: logits `[R, vocab_size]`, a row for each chunk that samples, in order."""
        if not self.is_decode(chunks):
            return super().run(chunks)
        size = self.capture_sizes[bisect_left(self.capture_sizes, len(chunks))]
        self.buffers.fill(plan_step(chunks, self.block_size, CPU), size)
        self.replays[size]()
        return self.buffers.logits[: len(chunks)].clone()  # the next step writes over the buffer


def runner_for(model: Qwen3ForCausalLM, pool: KvPool, max_rows: int) -> ModelRunner:
    """The fastest runner there is: graphs on a GPU whose attention kernel can be recorded, lesson 5's runner elsewhere.

    Of the kernels only triton leaves lengths on the device; the others look at them.
    """
    if pool.device.type == "cuda" and getattr(pool.kernel, "name", None) == "triton":
        return GraphRunner(model, pool, max_rows, CudaCapture())
    return ModelRunner(model, pool)

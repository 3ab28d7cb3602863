"""Lesson 10. Records decode steps once and replays them: one launch instead of hundreds.

A decode step of a small model is hundreds of kernels of a few microseconds each, and launching one takes the host about
as long. A CUDA graph records the launches once; replaying it is a single call. But it records *addresses and numbers*:
where each tensor was, and how many rows there were. So

- everything that a step reads or writes is in buffers that never move, and a step begins with a copy into them;
- there is a graph for each of several capture sizes, and a batch is filled up to the next size with padding rows: no
  query, no keys, and a slot of the null block to write into;
- code that reads a value (`.tolist()`, `.item()`, an `if` on a tensor) cannot be recorded, not even in a kernel.

Prefill and mixed steps run as before: their shapes hardly ever repeat, and they keep the device busy anyway.

The recording itself is behind `Capture`. With `no_graph` the same padded path runs on any machine, which is what the
tests use; `CudaCapture` needs a GPU. The capture sizes, and the memory pool that their graphs share, follow vLLM (Kwon
et al., 2023).
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.base.errors import UserError
from mini_engine.engine.runner import ModelRunner, Runner, Step, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.staging import Staging, Table, block_of, uploaded
from mini_engine.kv.block_tensor import ForwardMeta

CPU = torch.device("cpu")
CAPTURE_STEP = 8  # between capture sizes from 8 on, so a step has at most 7 rows of padding

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]  # runs and records work whose tensors never move


def no_graph(work: Callable[[], None]) -> Replay:
    """A capture that records nothing: replaying runs `work`."""
    return work


class CudaCapture:
    """Records CUDA graphs, which share one memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Run `work` once to create everything a first call creates (compiled kernels, workspaces), then record it.

        Other threads may use the GPU meanwhile, as lesson 12's copier does for another engine of this process.
        """
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
            work()
        return graph.replay


def capture_sizes_up_to(max_rows: int) -> list[int]:
    """Return the batch sizes that get a graph: 1, 2, 4, 8, then every 8th, and max_rows itself.

    Raises:
        UserError: max_rows is less than 1.
    """
    if max_rows < 1:
        raise UserError(f"max_rows is {max_rows}; capture sizes need at least 1 row")
    capture_sizes = chain((1, 2, 4), range(CAPTURE_STEP, max_rows, CAPTURE_STEP))
    return [size for size in capture_sizes if size < max_rows] + [max_rows]


class DecodeBuffers:
    """The tensors that captured steps read and write, allocated once. Each capture size uses their first rows.

    token_ids, positions, slot_mapping: `[max_rows]` int64.
    cu_seqlens_q: `[max_rows + 1]` int32. seq_lens_kv: `[max_rows]` int32. block_table: `[max_rows, max_blocks]` int32.
    logits: `[max_rows, vocab_size]`. extras: the shapes and dtypes of the tensors that `Extras` add.

    Initially all rows are padding. `dtype` is that of the logits. All but the logits lie in one block, `tables`
    `[n]` uint8, the block table last: the bytes of a step's rows are the first ones, and one copy moves them. A step is
    filled in on the host, in buffers with an empty vocabulary in pinned memory.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
        extras: Sequence[Table] = (),
    ) -> None:
        rows, starts = Table((max_rows,), torch.int64), Table((max_rows + 1,), torch.int32)
        shapes = [*extras, *[rows] * 3, starts, Table((max_rows,), torch.int32)]
        self.block_size = block_size
        self.tables, views = block_of([*shapes, Table((max_rows, max_blocks), torch.int32)], device, pin_memory)
        self.extras, (self.token_ids, self.positions, self.slot_mapping) = views[:-6], views[-6:-3]
        self.cu_seqlens_q, self.seq_lens_kv, self.block_table = views[-3:]
        self.logits = torch.zeros(max_rows, vocab_size, dtype=dtype, device=device)

    def bytes_of(self, size: int) -> int:
        """Return the number of bytes of `tables` that a step of `size` rows fills."""
        return len(self.tables) - Table(self.block_table.shape, torch.int32).bytes + self.block_table[:size].nbytes

    def meta(self, size: int) -> ForwardMeta:
        """Return the first `size` rows as a plan: views, at the same addresses in every call."""
        return ForwardMeta(
            positions=self.positions[:size],
            slot_mapping=self.slot_mapping[:size],
            cu_seqlens_q=self.cu_seqlens_q[: size + 1],
            seq_lens_kv=self.seq_lens_kv[:size],
            block_table=self.block_table[:size],
            block_size=self.block_size,
        )

    def fill(self, step: Step, size: int) -> None:
        """Copy in a decode step of at most `size` rows, and make the remaining rows up to `size` padding.

        A padding row is token 0 at position 0 and slot 0, feeds no query, has no keys, and null blocks in its table.
        The buffers stay where they are: only their contents change. Columns of block_table beyond the step's own may
        keep what they held: no kernel reads past a sequence's end.
        """
        meta, count = step.meta, len(step.token_ids)
        spare = (0, size - count)
        self.token_ids[:size].copy_(F.pad(step.token_ids, spare))
        self.positions[:size].copy_(F.pad(meta.positions, spare))
        self.slot_mapping[:size].copy_(F.pad(meta.slot_mapping, spare))
        self.cu_seqlens_q[: size + 1].copy_(F.pad(meta.cu_seqlens_q, spare, value=count))
        self.seq_lens_kv[:size].copy_(F.pad(meta.seq_lens_kv, spare))
        self.block_table[:size, : meta.block_table.shape[1]].copy_(F.pad(meta.block_table, (0, 0, *spare)))


class Extras(Protocol):
    """Further inputs of a captured step, beyond lesson 3's plan: lesson 11's state slots, lesson 15's tables."""

    def tables(self, max_rows: int, max_blocks: int) -> Sequence[Table]:
        """Return the shape and dtype of each tensor, for steps of at most `max_rows` rows."""
        ...

    def fill(self, tensors: Sequence[Tensor], chunks: Sequence[Chunk], meta: ForwardMeta, size: int) -> None:
        """Copy in the extras of a step of these chunks, and make the remaining rows up to `size` padding.

        Args:
            tensors: on the host. meta: the plan of the chunks.
        """

    def complete(self, meta: ForwardMeta, tensors: Sequence[Tensor], size: int) -> ForwardMeta:
        """Add the first `size` rows of `tensors`, which never move, to a plan."""
        ...


class ExtrasInTurn:
    """The extras of each of a model's kinds of layers, one after another; none if K and V are all it keeps."""

    def __init__(self, parts: Sequence[Extras] = ()) -> None:
        self.parts = parts

    def tables(self, max_rows: int, max_blocks: int) -> Sequence[Table]:
        """Return the tables of all parts."""
        return [table for part in self.parts for table in part.tables(max_rows, max_blocks)]

    def fill(self, tensors: Sequence[Tensor], chunks: Sequence[Chunk], meta: ForwardMeta, size: int) -> None:
        """Fill the tensors of each part."""
        for part, own in self._with_tensors(tensors):
            part.fill(own, chunks, meta, size)

    def complete(self, meta: ForwardMeta, tensors: Sequence[Tensor], size: int) -> ForwardMeta:
        """Return the plan with what each part adds to that of the parts before it."""
        for part, own in self._with_tensors(tensors):
            meta = part.complete(meta, own, size)
        return meta

    def _with_tensors(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Extras, Sequence[Tensor]]]:
        rest = iter(tensors)
        for part in self.parts:
            yield part, list(islice(rest, len(part.tables(1, 1))))


NO_EXTRAS = ExtrasInTurn()


class GraphRunner:
    """A runner that replays decode steps. It captures every size when it is created, the largest first, so that the
    smaller ones find memory in the pool; and again when the pool has shrunk, for then its tensors are others.

    Args:
        eager: lesson 5's runner, whose model and pool it uses; it plans all other steps.
        max_rows: the largest number of requests in one decode step: the scheduler's max_num_seqs.
        capture: `CudaCapture()` for a GPU; `no_graph` runs the padded path on any device.
    """

    def __init__(self, eager: ModelRunner, max_rows: int, capture: Capture, extras: Extras = NO_EXTRAS) -> None:
        self.eager, self.model, self.pool, self.extras = eager, eager.model, eager.pool, extras
        self.block_size, model = eager.block_size, eager.model
        max_blocks = min(self.pool.num_blocks - 1, -(-model.config.max_model_len // self.block_size))
        more = extras.tables(max_rows, max_blocks)
        buffers = partial(DecodeBuffers, max_rows, max_blocks, self.block_size, extras=more)
        self.buffers = buffers(model.config.vocab_size, model.dtype, model.device)
        self.host = buffers(0, model.dtype, CPU, pin_memory=model.device.type == "cuda")
        self.staging = Staging(self.host.tables, self.buffers.tables)
        self.capture_sizes = capture_sizes_up_to(max_rows)
        self.steps = {size: self.step_of(size) for size in self.capture_sizes}
        self.capture = capture
        self.capture_all()

    @property
    def fault(self) -> str:
        """The reason no step can run any more; empty while steps can run."""
        return self.eager.fault

    def close(self) -> None:
        """Release the resources that the runner holds outside this process."""
        self.eager.close()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size, over the pool as it is now. All rows are padding, so only the null block is written."""
        self.replays: dict[int, Replay] = {}  # graphs of a pool that has shrunk would write where it was
        self.buffers.tables.zero_()
        self.replays.update((size, self.capture(self.decode_of(size))) for size in reversed(self.capture_sizes))
        self.num_blocks = self.pool.num_blocks

    def decode_of(self, size: int) -> Callable[[], None]:
        """Return a forward pass that reads the first `size` rows of the buffers and writes their logits."""
        buffers = self.buffers
        meta = self.extras.complete(buffers.meta(size), buffers.extras, size)

        def decode() -> None:
            buffers.logits[:size].copy_(self.model(buffers.token_ids[:size], self.pool, meta))

        return decode

    def step_of(self, size: int) -> Step:
        """Return the first `size` rows of the host's buffers, padding included, as a step for the rest of the group."""
        meta = self.extras.complete(self.host.meta(size), self.host.extras, size)
        return Step(self.host.token_ids[:size], meta, torch.arange(size))

    def is_decode(self, chunks: Sequence[Chunk]) -> bool:
        """Return True if each chunk is one token that samples the next, and a captured batch size fits."""
        return len(chunks) <= self.capture_sizes[-1] and all(
            chunk.stop - chunk.start == 1 and chunk.samples for chunk in chunks
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass; return logits `[R, vocab_size]`: each chunk's last `num_logits` rows, in order."""
        if not self.is_decode(chunks):
            return self.run_eagerly(chunks)
        if self.pool.num_blocks != self.num_blocks:
            self.capture_all()
        size = self.capture_sizes[bisect_left(self.capture_sizes, len(chunks))]
        with self.staging.filling(self.host.bytes_of(size)):
            self.fill(chunks, size)
        with self.eager.group.running(self.steps[size]):
            self.replays[size]()
        return self.buffers.logits[: len(chunks)].clone()  # the next step overwrites the buffer

    def fill(self, chunks: Sequence[Chunk], size: int) -> None:
        """Plan a decode step in the host's buffers."""
        step = plan_step(chunks, self.block_size, CPU)
        self.host.fill(step, size)
        self.extras.fill(self.host.extras, chunks, step.meta, size)

    def run_eagerly(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run a prefill or mixed step without a graph; its plan reaches the device in one copy."""
        step = self.eager.plan(chunks, self.block_size, CPU)
        with self.eager.group.running(step):
            step = uploaded(step, self.pool.device)
            return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)


def can_record(pool: Any) -> bool:
    """Return True if steps over this pool can be recorded: a GPU, and a kernel that leaves lengths on the device."""
    return pool.device.type == "cuda" and pool.kernel.recordable


def counts_on_host(model: nn.Module) -> bool:
    """Return True if a layer reads a value on the host, as a mixture of experts does: no step can be recorded."""
    return not all(getattr(module, "recordable", True) for module in model.modules())


def runner_for(eager: ModelRunner, max_rows: int, extras: Extras = NO_EXTRAS) -> Runner:
    """Return a GraphRunner if steps can be recorded, otherwise `eager`.

    A failed capture is reported on stderr. It leaves the model as it was, so steps can still be launched kernel by
    kernel.
    """
    if not can_record(eager.pool):
        return eager
    try:
        return GraphRunner(eager, max_rows, CudaCapture(), extras)
    except Exception as error:  # torch's, CUDA's and Triton's errors have no common base class
        sys.stderr.write(
            f"cuda graphs: capturing decode steps failed ({first_cause(error)}). Launching their kernels one by one: "
            "the same tokens, but slower decode; cuda_graphs=False or --no-cuda-graphs turns capturing off.\n"
        )
        return eager


def first_cause(error: BaseException) -> str:
    """Return the original error on one line: ending a failed capture raises a second one."""
    while error.__context__ is not None:
        error = error.__context__
    return " ".join(str(error).split())[:200] or type(error).__name__

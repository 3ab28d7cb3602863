"""Course machinery. Suite `kernel`: one layer's attention over paged K and V in a decode, in every available way."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from scripts.bench.common import Report, left_out
from scripts.bench.options import add_threads
from scripts.bench.turns import memory_reader, read_bytes, synchronized, take_turns

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention import contract, cpu
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.cli.parser import whole_number
from mini_engine.kv.block_table import NULL_BLOCK

NUM_SEQS, KV_LEN = 16, 2048
HEADS, KV_HEADS, DIM, DTYPE = 16, 8, 128, torch.bfloat16  # Qwen3-0.6B's
SCALAR = "scalar C++"  # the baseline in paged_cpu.cpp; users cannot choose it
FLEX_PAGE = 128  # keys per page of FlexAttention, its default block size


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_threads(parser)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument(
        "--shared", type=whole_number(0), default=0, metavar="N", help="keys in blocks that all share (default: 0)"
    )


@dataclass(frozen=True)
class Batch:
    """A query for each of S sequences of kv_len keys; contiguous, and in blocks of a shuffled pool."""

    q: Tensor  # [S, H_q, D]
    k: Tensor  # [S, kv_len, H_kv, D]
    v: Tensor
    k_cache: Tensor  # [num_blocks, block_size, H_kv, D]
    v_cache: Tensor
    block_table: Tensor  # [S, blocks] int32

    @property
    def num_seqs(self) -> int:
        return len(self.k)

    @property
    def kv_len(self) -> int:
        return self.k.shape[1]

    @property
    def kv_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @functools.cached_property
    def tables(self) -> contract.Batch:
        """The tables that a kernel takes."""
        device = self.q.device
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=device)
        kv_lens = torch.full((self.num_seqs,), self.kv_len, dtype=torch.int32, device=device)
        return contract.Batch(starts, kv_lens, self.block_table)


def make_batch(num_seqs: int, kv_len: int, device: str = "cpu", block_size: int = 16, shared: int = 0) -> Batch:
    """Return a batch of random K and V, with each sequence's blocks scattered as in a pool after some use.

    Whole blocks of the first `shared` keys are the same for all.
    """
    torch.manual_seed(0)
    make, per = functools.partial(torch.randn, dtype=DTYPE, device=device), -(-kv_len // block_size)
    table = 1 + NULL_BLOCK + torch.randperm(num_seqs * per, device=device).view(num_seqs, per)
    table[:, : shared // block_size] = table[0, : shared // block_size]
    q = make(num_seqs, HEADS, DIM)
    k_cache, v_cache = (make(num_seqs * per + 1, block_size, KV_HEADS, DIM) for _ in range(2))
    k, v = (x[table].flatten(1, 2)[:, :kv_len].contiguous() for x in (k_cache, v_cache))
    return Batch(q, k, v, k_cache, v_cache, table.int())


# ---------------------------------------------------------------- contenders: each returns [S, H_q, D]


def sdpa(q: Tensor, k: Tensor, v: Tensor, fold: bool) -> Tensor:
    """Run torch's attention on q `[S, H_q, D]`, k and v `[S, kv_len, H_kv, D]`."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if fold:  # treat the heads of a group as query tokens
        return F.scaled_dot_product_attention(q.view(len(k), k.shape[1], -1, q.shape[2]), k, v).view_as(q)
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True).view_as(q)


def contiguous_sdpa(batch: Batch, fold: bool) -> Tensor:
    """Attend over contiguous K and V: the cost without paging."""
    return sdpa(batch.q, batch.k, batch.v, fold)


def gathered_sdpa(batch: Batch, fold: bool) -> Tensor:
    """Gather the blocks into contiguous K and V, then attend."""
    blocks = batch.block_table.long()
    k, v = (x[blocks].flatten(1, 2)[:, : batch.kv_len] for x in (batch.k_cache, batch.v_cache))
    return sdpa(batch.q, k, v, fold)


def paged_flex(batch: Batch) -> Callable[[], Tensor]:
    """Prepare compiled FlexAttention over its own pages (torch's experimental PagedAttention).

    Raises:
        UserError: it cannot be compiled here.
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

    seqs, kv_len, kv_heads, dim = batch.k.shape
    device, dtype = batch.q.device, batch.q.dtype
    pages = PagedAttention(seqs * kv_len // FLEX_PAGE, FLEX_PAGE, seqs, device=str(device))
    pages.empty_pages = torch.randperm(pages.n_pages).tolist()
    shape = (1, kv_heads, seqs * kv_len, dim)
    k_pages, v_pages = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    each = torch.arange(seqs, device=device)
    for s in range(seqs):
        pages.reserve(each[s], torch.tensor(kv_len, device=device))
    places = torch.arange(kv_len, device=device).expand(seqs, -1)
    pages.assign(each, places, batch.k.transpose(1, 2), batch.v.transpose(1, 2), k_pages, v_pages)
    mask = create_block_mask(noop_mask, seqs, None, 1, kv_len, device=device, BLOCK_SIZE=(128, FLEX_PAGE))
    paged_mask = pages.convert_logical_block_mask(mask)
    attend = torch.compile(flex_attention, dynamic=False)
    q = batch.q.view(seqs, -1, 1, dim)

    def run() -> Tensor:
        return attend(q, k_pages, v_pages, block_mask=paged_mask, enable_gqa=True).view_as(batch.q)

    try:
        with torch.inference_mode():
            run()
    except Exception as error:  # a compiler may raise anything
        raise UserError(f"it does not compile here ({str(error).strip().splitlines()[0][:120]})") from error
    return run


def our_kernel(name: str, batch: Batch) -> Callable[[], Tensor]:
    """Return one of this course's kernels, bound to the batch."""
    if name == SCALAR:
        cpu.LIBRARY.function("paged_attention_scalar", batch.q.dtype)  # UserError where it cannot be built
        kernel = contract.Kernel(name, cpu.scalar_attention)
    else:
        kernel = load_kernel(name, batch.q.device, batch.q.dtype)
    return lambda: kernel(batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.q.shape[2] ** -0.5)


def contenders(batch: Batch, quick: bool) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Map the name of each contender to a function that prepares it."""
    ways: dict[str, Callable[[], Callable[[], Tensor]]] = {}
    for name, way in (("gather + SDPA", gathered_sdpa), ("contiguous + SDPA", contiguous_sdpa)):
        ways[name] = lambda way=way: functools.partial(way, batch, fold=False)
        ways[f"{name}, folded"] = lambda way=way: functools.partial(way, batch, fold=True)
    if not quick:
        ways["FlexAttention, paged"] = lambda: paged_flex(batch)
    for name in (
        "reference",
        "blockwise",
        "torch",
        *((SCALAR, "cpu") if batch.q.device.type == "cpu" else ("triton",)),
    ):
        ways[f"our {name}"] = functools.partial(our_kernel, name, batch)
    return ways


def prepare(batch: Batch, quick: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the contenders that run here, after checking their results; name the others on stderr."""
    ready, expected = {}, contiguous_sdpa(batch, fold=False)
    for name, make in contenders(batch, quick).items():
        try:
            ready[name] = make()
        except UserError as why:
            left_out(name, why)
            continue
        error = (ready[name]().float() - expected.float()).abs().max() / expected.abs().max()
        if not error < 0.02:
            raise AssertionError(f"{name} is off by {error:.2g}: a benchmark of wrong results means nothing")
    return ready


def run(args) -> Report:
    """Measure all contenders, and reading memory, in turns."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; omit the option to measure on the CPU")
    with torch.inference_mode():
        batch = make_batch(NUM_SEQS, KV_LEN, args.device, shared=min(args.shared, KV_LEN))
        runs = {"": memory_reader(args.device)} | prepare(batch, args.quick)
        runs = {name: synchronized(run, args.device) for name, run in runs.items()}
        timings = take_turns(runs, args.rounds or (9 if args.quick else 25), "kernel")
    speed = read_bytes(args.device) / timings.pop("").median
    slowest = timings["gather + SDPA"].median
    rows = []
    for name, timing in timings.items():
        read = batch.kv_bytes / timing.median
        figures = {"× gather": slowest / timing.median, "% of memory": 100 * read / speed, "GB/s": read / 1e9}
        rows.append({"contender": name} | timing.columns() | figures)
    notes = [
        f"one layer, {HEADS} query heads on {KV_HEADS} key/value heads of {DIM}, bfloat16, blocks of 16",
        f"decode: {NUM_SEQS} sequences of {KV_LEN} keys, {args.shared} of them shared",
        f"memory read at {speed / 1e9:.1f} GB/s in the same rounds",
    ]
    return Report("kernel", rows, notes)

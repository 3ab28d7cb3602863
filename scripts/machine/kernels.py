"""Course machinery. The attention kernels against the reference: each that works here, on the same small batch.

The reference runs in float64 on the kernels' own inputs in their dtype, so an error is a kernel's alone; only the
rotation of int4's queries is float32 on both sides. The batch has decode rows, a chunk after a history and a whole
prompt. Slots that no sequence owns are NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from scripts.machine.about import half_dtype
from scripts.machine.schema import KernelCheck

import torch
from torch import Tensor

from mini_engine.attention import reference, registry
from mini_engine.attention.contract import Batch
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.kv.block_table import NULL_BLOCK

LENGTHS = ((1, 700), (1, 33), (1, 16), (40, 300), (130, 130))  # queries and keys of each sequence
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 8, 2, 64, 16
RANK, ROPE = 128, 32  # lesson 16's latents
WINDOW = 50
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
FAMILIES = {"attention": registry.KERNEL_NAMES[1:], "window": ("reference", "torch", "cpu", "triton")}
FAMILIES |= dict.fromkeys(("int8", "int4"), ("torch", "cpu", "triton"))
FAMILIES |= {"latents": ("reference", "blockwise", "torch", "cpu")}
ONLY_ON = {"cpu": "cpu", "triton": "cuda"}  # kernels for one device; others run on both


class Inputs(NamedTuple):
    """Inputs of a kernel: its first tensors (queries, caches), its batch, and the scale."""

    tensors: tuple[Tensor, ...]
    batch: Batch
    scale: float

    def to(self, device: str, dtype: torch.dtype) -> "Inputs":
        """Return the inputs on a device, with numbers (but not rows of bytes) in a dtype."""
        tensors = (x.to(device, dtype if x.is_floating_point() else x.dtype) for x in self.tensors)
        return Inputs(tuple(tensors), Batch(*(x.to(device) for x in self.batch)), self.scale)

    def answer(self, kernel: Callable[..., Tensor]) -> Tensor:
        """Run a kernel; return its result on the CPU, in float64."""
        return kernel(*self.tensors, self.batch, self.scale).double().cpu()


def make_batch(widths: tuple[int, int], heads: int = HEADS, kv_heads: int = KV_HEADS) -> tuple[list[Tensor], Inputs]:
    """Return queries of these widths, and a batch of two caches `[num_blocks, block_size, kv_heads, width]`."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *(q_len for q_len, _ in LENGTHS)]).cumsum(0).int()
    needs = [-(-kv_len // BLOCK_SIZE) for _, kv_len in LENGTHS]
    order = 1 + NULL_BLOCK + torch.randperm(sum(needs), generator=generator).int()
    table = torch.full((len(LENGTHS), max(needs)), -1, dtype=torch.int32)
    caches = [torch.full((sum(needs) + 1, BLOCK_SIZE, kv_heads, width), float("nan")) for width in widths]
    for s, blocks in enumerate(order.split(needs)):
        table[s, : needs[s]] = blocks
        slots = (blocks[:, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: LENGTHS[s][1]]
        for cache in caches:
            cache.flatten(0, 1)[slots] = torch.randn(len(slots), *cache.shape[2:], generator=generator)
    queries = [torch.randn(int(starts[-1]), heads, width, generator=generator) for width in widths]
    kv_lens = torch.tensor([kv_len for _, kv_len in LENGTHS], dtype=torch.int32)
    return queries, Inputs(tuple(caches), Batch(starts, kv_lens, table), widths[0] ** -0.5)


def attention_batch() -> Inputs:
    """Return lesson 3's inputs: q, keys, values."""
    (q, _), batch = make_batch((DIM, DIM))
    return batch._replace(tensors=(q, *batch.tensors))


def row_batch(name: str) -> Inputs:
    """Return lesson 17's inputs: the same with rows of bytes. NaN has no row, so unowned slots are zero."""
    from mini_engine.quantized.formats import FORMATS

    batch = attention_batch()
    q, *caches = batch.tensors
    return batch._replace(tensors=(q, *(FORMATS[name].write(x.nan_to_num(0)) for x in caches)))


def latent_batch() -> Inputs:
    """Return lesson 16's inputs: queries and caches of two widths, one row for all heads."""
    queries, batch = make_batch((RANK, ROPE), kv_heads=1)
    return batch._replace(tensors=(*queries, *batch.tensors))


class Family(NamedTuple):
    """Kernels with one contract: inputs, the specification, and the loader of a kernel by name."""

    batch: Callable[[], Inputs]
    specification: Callable[..., Tensor]
    load: Callable[..., Callable[..., Tensor]]


def family(name: str) -> Family:
    """Return a family by its name. Each lesson's modules are imported only for its own kernels."""
    if name == "attention":
        return Family(attention_batch, reference.paged_attention, registry.load_kernel)
    if name == "window":
        from mini_engine.windows import attention

        specification = partial(attention.reference_attention, window=WINDOW)
        return Family(attention_batch, specification, partial(registry.load_kernel, window=WINDOW))
    if name in ("int8", "int4"):
        load = partial(registry.load_kernel, rows=name)
        return Family(partial(row_batch, name), load("reference"), load)
    from mini_engine.latents import attention as latents

    return Family(latent_batch, latents.reference_attention, partial(registry.load_kernel, latents=True))


def asked() -> list[dict[str, Any]]:
    """Return the checks for this machine: family, kernel, dtype and device."""
    device, half = half_dtype()
    found = []
    for group, names in FAMILIES.items():
        for where in dict.fromkeys(("cpu", device)):
            dtypes = ("float32", half if where == device else "bfloat16")
            mine = [name for name in names if ONLY_ON.get(name, where) == where]
            found += [dict(group=group, name=name, dtype=dtype, device=where) for name in mine for dtype in dtypes]
    return found


def check(group: str, name: str, dtype: str, device: str) -> KernelCheck:
    """Compare one kernel with the reference. A kernel that cannot work here is left out, with the reason."""
    found = KernelCheck(f"{group}: {name}", dtype, device, "ok", limit=LIMITS[dtype])
    kinds = family(group)
    batch = kinds.batch().to("cpu", DTYPES[dtype])
    expected = batch.to("cpu", torch.float64).answer(kinds.specification)
    try:
        kernel = kinds.load(name, device, DTYPES[dtype])
    except UserError as why:
        found.status, found.why = "left out", str(why)
        return found
    difference = (batch.to(device, DTYPES[dtype]).answer(kernel) - expected).abs().max()
    error = float(difference / expected.abs().max())
    if error <= LIMITS[dtype]:
        found.error = error
    else:  # includes NaN
        found.status, found.error = "failed", error if error < float("inf") else None
        found.why = f"it is off by {error:.2g}; at most {LIMITS[dtype]:.0e} may be rounding"
    return found

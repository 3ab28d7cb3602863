"""Lesson 3. Suite `compiled`: the Triton kernels compiled for GPUs without having one, and an H100's limits on paper.

A kernel that needs more registers than a thread has spills them to memory: right answers at a fraction of the speed,
and nothing on a CPU shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.bench.common import Report
from scripts.bench.gpu_target import H100_MATRIX, H100_READ, POINTERS, SHARED_BYTES, Compiled, compile_for
from scripts.bench.options import numbers

import torch

from mini_engine.attention.contract import EVERY_KEY
from mini_engine.attention.triton_launch import LaunchConfig, launch_config

BLOCK_SIZE, REACH = 16, 4096


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument(
        "--targets", type=numbers(SHARED_BYTES), default=list(SHARED_BYTES),
        metavar="75,80,90", help="compute capabilities (default: all of these)",
    )  # fmt: skip
    parser.add_argument(
        "--tile", type=int, nargs=2, choices=(16, 32, 64, 128), metavar=("ROWS", "KEYS"),
        help="of prompts: 16, 32, 64 or 128 each (default: the engine's choice)",
    )  # fmt: skip
    parser.add_argument("--warps", type=int, choices=(1, 2, 4, 8, 16), help="of prompts (default: the engine's choice)")


@dataclass(frozen=True)
class Load:
    """One call of the kernel: `num_seqs` sequences of `kv_len` keys, of which the last `q_len` are new.

    launch: fields of the engine's launch to override, to see what the compiler makes of them.
    """

    num_seqs: int
    q_len: int
    kv_len: int
    dtype: str
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    kv_dtype: str = "auto"
    window: int = EVERY_KEY
    launch: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """The load's name in the table."""
        what = "decode" if self.q_len == 1 else "prefill"
        rows = "" if self.kv_dtype == "auto" else f" of {self.kv_dtype}"
        return f"{what} {self.num_seqs} x {self.kv_len:,}, {POINTERS[self.dtype][1:]}{rows}"

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes between memory and the chip: each key and value once, queries and results once."""
        element = 2 if self.dtype != "float32" else 4
        row = self.dim * element
        if self.kv_dtype != "auto":
            from mini_engine.quantized.formats import FORMATS

            row = FORMATS[self.kv_dtype].row_bytes(self.dim)
        new = 2 * self.num_seqs * self.q_len * self.heads * self.dim * element
        return 2 * self.num_seqs * self.kv_len * self.kv_heads * row + new

    @property
    def operations(self) -> int:
        """Multiplications and additions: two products of `dim` for every query head and key that it sees."""
        pairs = sum(range(self.kv_len - self.q_len + 1, self.kv_len + 1))
        return 4 * self.num_seqs * self.heads * self.dim * pairs

    @property
    def h100_seconds(self) -> float:
        """The lower bound on an H100, in seconds: the time to read or to compute, whichever is longer."""
        return max(self.bytes_moved / H100_READ, self.operations / H100_MATRIX[self.dtype])

    def config(self, capability: int) -> LaunchConfig:
        """Return the engine's launch for this load, with the overrides in `launch`."""
        chosen = launch_config(
            num_rows=self.num_seqs * self.q_len,
            num_seqs=self.num_seqs,
            group=self.heads // self.kv_heads,
            dim=self.dim,
            reach=min(max(REACH, self.kv_len), self.window),
            tensor_cores=self.dtype != "float32" and capability >= 80,
        )
        return chosen._replace(**dict(self.launch))


def compile_attend(load: Load, capability: int) -> Compiled:
    """Compile lesson 3's kernel (lesson 17's, for rows) as the engine would launch it for this load."""
    from mini_engine.attention import triton_kernel as kernel

    load_rows, pointer = kernel._load_rows, POINTERS[load.dtype]
    if load.kv_dtype != "auto":
        from mini_engine.quantized.triton_kernel import LOADERS

        load_rows, pointer = LOADERS[load.kv_dtype], {"int8": "*i8", "int4": "*u8"}[load.kv_dtype]
    q = torch.empty(load.num_seqs * load.q_len, load.heads, load.dim, dtype=getattr(torch, load.dtype), device="meta")
    cache = torch.empty(1, BLOCK_SIZE, load.kv_heads, load.dim, device="meta")
    constants = kernel.constants(load.config(capability), q, cache, load.window) | {"LOAD_ROWS": load_rows}
    types = dict.fromkeys(("q", "out"), POINTERS[load.dtype]) | dict.fromkeys(("k_cache", "v_cache"), pointer)
    types |= dict.fromkeys(("starts", "kv_lens", "table"), "*i32") | dict.fromkeys(("parts", "stats"), "*fp32")
    return compile_for(kernel._attend, types | {"scale": "fp32"}, constants, capability)


def compile_merge(load: Load, capability: int) -> Compiled:
    """Compile the kernel that merges the splits of this load's decodes."""
    from mini_engine.attention import triton_kernel as kernel

    config = load.config(capability)
    sizes = dict(HEADS=load.heads, DIM=load.dim, WIDTH=config.width, SPLITS=config.padded_splits)
    constants = sizes | {"WINDOW": load.window}
    types = dict.fromkeys(("parts", "stats"), "*fp32") | {"out": POINTERS[load.dtype]}
    return compile_for(kernel._merge, types | dict.fromkeys(("starts", "kv_lens"), "*i32"), constants, capability)


def loads(prompts: tuple[tuple[str, int], ...]) -> Iterator[Load]:
    """Yield the loads of the table: a batch of decodes and a prompt in each dtype, and decodes over rows.

    prompts: overrides of a prompt's launch.
    """
    for dtype in POINTERS:
        yield Load(32, 1, 2048, dtype)
        yield Load(1, 2048, 2048, dtype, launch=prompts)
    for kv_dtype in ("int8", "int4"):
        yield Load(32, 1, 2048, "float16", kv_dtype=kv_dtype)


def can_run(load: Load, capability: int) -> bool:
    """Return True if a GPU of this compute capability supports the dtype: a T4 has no bfloat16."""
    return load.dtype != "bfloat16" or capability >= 80


def run(args) -> Report:
    """Compile every load for every target."""
    rows, asked = [], list(zip(("rows", "keys"), args.tile, strict=True)) if args.tile else []
    asked += [("warps", args.warps)] if args.warps else []
    for load in loads(tuple(asked)):
        for capability in args.targets:
            if not can_run(load, capability):
                continue
            found, config = compile_attend(load, capability), load.config(capability)
            row: dict[str, Any] = {"kernel": load.name, "target": f"sm_{capability}"}
            row |= {"tile": f"{config.rows} x {config.keys}", "warps": config.warps}
            row |= {"regs": found.registers, "spilled": found.spilled, "KiB": found.shared / 1024}
            row |= {"MB": load.bytes_moved / 1e6, "Gflop": load.operations / 1e9}
            rows.append(row | {"H100 us": load.h100_seconds * 1e6})
    note = "tile: rows of queries x keys; spilled: bytes of a thread; KiB: shared memory; H100 us: at best, on paper"
    return Report("compiled", rows, ["one layer of Qwen3-0.6B's shape: 16 heads, 8 of keys and values", note])

"""Lesson 10. The kernels between a layer's matrices, compiled for GPUs without having one, and a layer on paper.

Part of suite `compiled`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.bench.gpu_target import POINTERS, Compiled, compile_for, h100_seconds

import torch


@dataclass(frozen=True)
class LayerLoad:
    """One layer of a step with `rows` tokens. The default shape is Qwen3-0.6B's."""

    rows: int
    dtype: str
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    intermediate: int = 3072

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return getattr(torch, self.dtype).itemsize

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each matrix."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        return {
            "qkv": (self.hidden, qkv),
            "o": (self.heads * self.dim, self.hidden),
            "gate and up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }

    @property
    def bytes_moved(self) -> dict[str, int]:
        """The fewest bytes between memory and the chip for each launch, by name; attention is lesson 3's."""
        rows, element = self.rows, self.element
        heads = (self.heads + 2 * self.kv_heads) * self.dim
        numbers = {name: n * k + rows * (n + k) for name, (k, n) in self.matrices.items()}
        numbers["add and norm"] = 4 * rows * self.hidden + self.hidden
        numbers["norm, RoPE, store"] = 2 * rows * heads + rows * self.dim + 2 * self.dim
        numbers["SiLU times up"] = 3 * rows * self.intermediate
        slots = {"norm, RoPE, store": 8 * rows}
        return {name: count * element + slots.get(name, 0) for name, count in numbers.items()}

    def h100_seconds(self, name: str) -> float:
        """Return the lower bound of a launch on an H100, in seconds: reading or computing, whichever is longer."""
        inputs, outputs = self.matrices.get(name, (0, 0))
        return h100_seconds(self.bytes_moved[name], 2 * self.rows * inputs * outputs, self.dtype)


def compile_between(load: LayerLoad, capability: int) -> Iterator[tuple[str, int, Compiled]]:
    """Compile each kernel as the engine would launch it. Yield its name in `bytes_moved`, its warps and its needs."""
    from mini_engine.layers import layer_kernels as kernels

    pointer = POINTERS[load.dtype]
    rope = ("qkv", "weights", "cos", "sin", "q_out", "k_out", "v_out")
    cases: list[tuple[str, Any, tuple[str, ...], dict[str, Any]]] = [
        ("add and norm", kernels._add_norm, ("x", "delta", "weight", "out"), kernels.norm_constants(load.hidden, True)),
        ("norm, RoPE, store", kernels._norm_rope, rope, kernels.rope_constants(load.heads, load.kv_heads, load.dim)),
        ("SiLU times up", kernels._silu_mul, ("gate_up", "out"), kernels.silu_constants(load.intermediate)),
    ]
    for name, kernel, pointers, constants in cases:
        types = dict.fromkeys(pointers, pointer) | {"rows": "*i64", "eps": "fp32"}
        yield name, constants["num_warps"], compile_for(kernel, types, constants, capability)


def layer_rows(load: LayerLoad, targets: list[int]) -> list[dict[str, Any]]:
    """Return the table of one layer without attention: its kernels for each target, and its matrices on paper."""
    rows = []
    for capability in targets:
        for name, warps, found in compile_between(load, capability):
            row: dict[str, Any] = {"in a layer": name, "times": 2 if name == "add and norm" else 1}
            row |= {"target": f"sm_{capability}", "warps": str(warps), "regs": str(found.registers)}
            row |= {"spilled": str(found.spilled), "KiB": f"{found.shared / 1024:.2f}"}
            rows.append(row | {"MB": load.bytes_moved[name] / 1e6, "H100 us": load.h100_seconds(name) * 1e6})
    matrices = [on_paper(f"matrix {name}", load.bytes_moved[name], load.h100_seconds(name)) for name in load.matrices]
    return rows + matrices


def on_paper(name: str, num_bytes: int, seconds: float) -> dict[str, Any]:
    """Return a row of the table for a launch that is not compiled here."""
    blank = dict.fromkeys(("target", "warps", "regs", "spilled", "KiB"), "")
    return {"in a layer": name, "times": 1} | blank | {"MB": num_bytes / 1e6, "H100 us": seconds * 1e6}

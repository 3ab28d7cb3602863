"""Course machinery. The attention kernels that `load_kernel` offers, and how close each has to come to float64."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_engine.attention import cpu
from mini_engine.attention.contract import EVERY_KEY, Kernel, Wanted
from mini_engine.attention.registry import MODULES, load_kernel
from mini_engine.base.errors import UserError
from mini_engine.quantized.formats import FORMATS
from tests.kernels.cases import Case, make_case

kept_case = functools.lru_cache(maxsize=64)(make_case)  # kernels of one cache get the same cases, one after another
DTYPES = (torch.float32, torch.bfloat16)
CACHES = [(rows, latents) for latents in (False, True) for rows in (None, *FORMATS)]
SCALAR = "scalar C++"


@dataclass(frozen=True)
class Entry:
    """A kernel of the table, on a device. `interpret` runs Triton's elsewhere."""

    name: str
    rows: str | None = None
    latents: bool = False
    device: str = "cpu"
    interpret: Callable[..., Tensor] | None = None

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return self.wanted().title + where

    def wanted(self, dtype: torch.dtype = torch.float32, window: int = EVERY_KEY) -> Wanted:
        return Wanted(self.name, torch.device(self.device), dtype, self.rows, window, self.latents)

    def windows(self, *windows: int) -> tuple[int, ...]:
        """Return these windows, or one without end if the kernel takes none."""
        return windows if self.wanted(window=1).cache in MODULES else (EVERY_KEY,)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the largest error relative to the largest sum without signs."""
        if dtype == torch.float32:
            return 5e-6
        if self.name in ("reference", "torch"):
            return 2e-2  # they round scores and weights, too
        rounds = self.rows or self.name == "triton"  # rotated queries, scaled values; the interpreter cuts off bits
        return 1e-2 if rounds else 5e-3

    def case(self, lengths: Sequence[tuple[int, int]], **options: Any) -> Case:
        """Return a case over what this kernel reads; `options` are `make_case`'s. Other tests share it: change none."""
        return kept_case(tuple(lengths), FORMATS[self.rows] if self.rows else None, self.latents, **options)

    def load(self, dtype: torch.dtype = torch.float32, window: int = EVERY_KEY) -> Kernel:
        """Return the kernel; skip the test if it cannot work here."""
        if self.name == SCALAR:
            return Kernel(SCALAR, functools.partial(cpu.scalar_attention, window=window))
        try:
            return load_kernel(*self.wanted(dtype, window))
        except UserError as why:
            pytest.skip(f"NOT CHECKED: the {self} kernel; {why}")

    def __call__(self, case: Case) -> Tensor:
        """Return the kernel's answer to a case, on the CPU."""
        if self.interpret:
            return self.interpret(self.wanted(case.q.dtype, case.window), *case.inputs)
        return self.load(case.q.dtype, case.window)(*case.on(self.device)).cpu()

    def check(self, case: Case, teach: str) -> None:
        """Compare the kernel's answer with float64's."""
        out = self(case)
        assert out.shape == case.q.shape and out.dtype == case.q.dtype, "the answer has q's shape and dtype"
        assert not out.isnan().any(), f"{teach}, {case}: NaN from padding, from another's slot, or behind a window"
        assert not out[case.batch.cu_seqlens_q[-1] :].any(), "rows past cu_seqlens_q[-1] give zeros"
        error = case.error_of(out)
        assert error < self.tolerance(out.dtype), f"{teach}, {case}: an error of {error:.2g} against float64"


def table() -> Iterator[Entry]:
    """Yield every kernel that the registry names, and the scalar C++ that the fast one is read beside."""
    yield Entry(SCALAR)
    for rows, latents in CACHES:
        cache = Entry("auto", rows, latents).wanted().cache
        for name in import_module(MODULES[cache]).LOADERS:
            yield Entry(name, rows, latents)


KERNELS = list(table())
IN_PROCESS = [kernel for kernel in KERNELS if kernel.name != "triton"]
WINDOWED = [kernel for kernel in IN_PROCESS if kernel.windows(1) == (1,) and kernel.name != SCALAR]
CPP = [kernel for kernel in KERNELS if kernel.name == "cpu"]
TRITON = [kernel for kernel in KERNELS if kernel.name == "triton"]
ON_GPU = [Entry(name, device="cuda") for name in ("triton", "torch")] if torch.cuda.is_available() else []

"""Lesson 3. Compiles a Triton kernel for a GPU without having one, and asks the assembler what it needs.

Triton compiles for any NVIDIA GPU without one, and ptxas, which comes with its wheel, reports the result's needs.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.base.errors import UserError

# Shared memory that one program may ask for, in bytes, by compute capability: a T4's, an A100's, an H100's.
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10}
H100_READ = 3.35e12  # bytes/s
H100_MATRIX = {"float16": 989e12, "bfloat16": 989e12, "float32": 67e12}  # operations/s; float32 without tensor cores
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


@dataclass(frozen=True)
class Compiled:
    """The needs of a compiled kernel: registers per thread, spilled bytes, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_for(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int) -> Compiled:
    """Compile a Triton kernel for a GPU of this compute capability, 90 for an H100, and ask ptxas what it needs.

    types: of the arguments that are not int32 numbers. Pointers are assumed to be multiples of 16, like torch's.

    Raises:
        UserError: Triton cannot be imported, or interprets its kernels in this process.
    """
    try:
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise UserError(f"this needs Triton, which cannot be imported ({error})") from error
    if knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, and an interpreted kernel is not compiled; unset it")
    options = {"num_warps": constants["num_warps"]} if "num_warps" in constants else {}
    names = kernel.arg_names
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, values, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return Compiled(*assemble(ptxas, found.asm["ptx"], capability), found.metadata.shared)


def assemble(ptxas: Path, ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills."""
    arch = f"sm_{capability}{'a' if capability == 90 else ''}"  # a: with the instructions of this generation only
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, encoding="utf-8")
        command = [str(ptxas), "-v", f"-arch={arch}", str(file), "-o", str(file.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stderr
    registers, spilled = (
        re.search(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    assert registers and spilled, said
    return int(registers[1]), int(spilled[1])

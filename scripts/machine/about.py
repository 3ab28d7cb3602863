"""Course machinery. Facts about a machine: processor, memory, GPU, versions, the state of the source."""

import ctypes
import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

from scripts.bench.common import describe_machine
from scripts.machine.schema import Gpu, Machine

GIB = 2**30
FAST_BFLOAT16 = (8, 0)  # the first compute capability with bfloat16 in its tensor cores; a T4 has 7.5


def describe() -> Machine:
    """Return the facts about this machine and this checkout."""
    facts, memory = describe_machine(), memory_bytes()
    return Machine(
        cpu=facts["cpu"],
        architecture=platform.machine().lower(),
        cores=cores(),
        threads=facts["threads"],
        memory_gb=None if memory is None else round(memory / GIB, 1),
        load=None if facts["load"] is None else round(facts["load"], 1),
        gpu=describe_gpu(),
        system=system(),
        python=facts["python"],
        torch=facts["torch"],
        triton=version_of("triton"),
        transformers=version_of("transformers") or "missing",
        commit=facts["commit"],
        dirty=facts["dirty"],
    )


def system() -> str:
    """Return the system's name and version, without a kernel build's own names."""
    name = platform.system() or "unknown"
    if name == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if name == "Linux":
        return f"Linux, {' '.join(platform.libc_ver()).strip() or 'another libc'}"
    return f"{name} {platform.release()}"


def cores() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def describe_gpu() -> Gpu | None:
    """Return the facts about the first GPU that torch sees; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    about = torch.cuda.get_device_properties(0)
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return Gpu(about.name, capability, round(about.total_memory / GIB, 1), driver(), str(torch.version.cuda))


def driver() -> str:
    """Return the version of NVIDIA's driver; "unknown" if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    return "unknown"


def half_dtype() -> tuple[str, str]:
    """Return the device to measure on and its fast half precision: float16 on a GPU that is slow in bfloat16."""
    import torch

    if not torch.cuda.is_available():
        return "cpu", "bfloat16"
    return "cuda", "bfloat16" if torch.cuda.get_device_capability(0) >= FAST_BFLOAT16 else "float16"


def memory_bytes(wanted: str = "MemTotal") -> int | None:
    """Return the machine's memory in bytes, or "MemAvailable", if the system reports it; otherwise None."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{wanted}:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(AttributeError, OSError):
        return windows_memory(wanted)
    return None


def windows_memory(wanted: str) -> int:
    """Ask Windows for its memory. Raises AttributeError on other systems."""
    answer = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: two numbers of 32 bits, then seven of 64
    ctypes.c_uint32.from_buffer(answer).value = ctypes.sizeof(answer)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(answer)):  # type: ignore[attr-defined]
        raise OSError("GlobalMemoryStatusEx failed")
    return answer[1 if wanted == "MemTotal" else 2]

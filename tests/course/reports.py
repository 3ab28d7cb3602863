"""Course machinery. Reports of machines that do not exist, for tests."""

from scripts.machine.schema import Comparison, Gpu, KernelCheck, Lesson, Machine, Model, Rates, Report, Speed
from scripts.machine.speed import AT_ONCE, LOADS, PAIRS

T4 = Gpu("Tesla T4", "7.5", 14.6, "580.65.06", "13.0")


def machine(gpu: Gpu | None = None, **changes) -> Machine:
    """Return a machine with four cores."""
    facts = dict(
        cpu="A Processor", architecture="x86_64", cores=4, threads=4, memory_gb=16.0, load=0.1, gpu=gpu,
        system="Linux, glibc 2.36", python="3.11.7", torch="2.13.0", triton="3.7.1", transformers="5.23.0",
        commit="0123abc", dirty=False,
    )  # fmt: skip
    return Machine(**facts | changes)


def report(gpu: Gpu | None = None, **changes) -> Report:
    """Return a whole report in which everything is right."""
    device, half = ("cuda", "float16") if gpu else ("cpu", "bfloat16")
    names = (
        "attention: cpu",
        *(("attention: triton", "window: triton", "int8: triton", "int4: triton") if gpu else ()),
    )
    made = Report(
        "2026-11-24T10:00:00Z", False, machine(gpu), finished=True, seconds=321.0,
        lessons=[Lesson(n, f"Lesson {n}", "ok", device, 20, 20, 3.1) for n in range(17)],
        kernels=[KernelCheck(name, "float32", "cpu" if "cpu" in name else device, "ok", 2e-7, 1e-5) for name in names],
        model=Model("0.6B", half, device, 1.192),
        rates=Rates(device, 33.1, {"float32": 202.0, half: 434.0}),
        speeds=[Speed(load, n, "ok", 100.0 * n, 10.0, 0.5, 3.0, 5) for load in LOADS for n in AT_ONCE],
        comparisons=[Comparison(*pair, n, "ok", 1.5, 4.5, 3.0, n) for pair in PAIRS for n in AT_ONCE] if gpu else [],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made

"""Course machinery. Measures in a separate process, so that a crash or a hang costs one part and not the report.

A line of JSON in, a line of JSON out, over pipes (`scripts.bench.peer_protocol`):

    {"do": "kernel", "group": "attention", "name": "cpu", "dtype": "float32", "device": "cpu"}  -> a KernelCheck
    {"do": "load", "quick": false}                                                              -> a Model and its Rates
    {"do": "speed", "load": "decode", "at_once": 8, "seconds": 10}                              -> a Speed
    {"do": "compare", "first": …, "second": …, "at_once": 8, "seconds": 10}                     -> a Comparison

The answer comes as {"answer": …}, any exception as {"error": "…"}, a sentence.
"""

from dataclasses import asdict
from typing import Any

import scripts.smoke  # noqa: F401 (threads that wait sleep: most machines have other work, too)
from scripts.bench.peer_worker import serve


class Parts:
    """Everything that a process has loaded so far."""

    def __init__(self) -> None:
        self.bench: Any = None
        self.pairs: Any = None

    def answer(self, do: str, **what: Any) -> dict[str, Any]:
        """Carry out one request."""
        return getattr(self, f"do_{do}")(**what)

    def do_kernel(self, **what: Any) -> dict[str, Any]:
        from scripts.machine import kernels

        return asdict(kernels.check(**what))

    def do_load(self, quick: bool) -> dict[str, Any]:
        from scripts.machine.speed import Bench, Pairs

        self.bench = Bench(quick)
        self.pairs = Pairs(self.bench)
        return {"model": asdict(self.bench.about()), "rates": asdict(self.bench.rates())}

    def do_speed(self, **what: Any) -> dict[str, Any]:
        return asdict(self.bench.speed(**what))

    def do_compare(self, **what: Any) -> dict[str, Any]:
        return asdict(self.pairs.compare(**what))


if __name__ == "__main__":
    parts = Parts()
    serve(lambda request: {"answer": parts.answer(**request)})

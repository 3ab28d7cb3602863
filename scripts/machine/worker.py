"""Course machinery. Measures in a separate process, so that a crash or a hang costs one part and not the report.

A line of JSON in, a line of JSON out, over pipes (`scripts.bench.peer_protocol`):

    {"do": "kernel", "group": "attention", "name": "cpu", "dtype": "float32", "device": "cpu"}  -> a KernelCheck
    {"do": "load", "quick": false}                                                              -> a Model and its Rates
    {"do": "speed", "load": "decode", "at_once": 8, "seconds": 10}                              -> a Speed
    {"do": "compare", "first": …, "second": …, "at_once": 8, "seconds": 10}                     -> a Comparison

The answer comes as {"answer": …}, any exception as {"error": "…"}, a sentence.
"""

import json
import os
from dataclasses import asdict
from typing import Any

import scripts.smoke  # noqa: F401 (threads that wait sleep: most machines have other work, too)


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


def main() -> None:
    """Answer requests until the input ends."""
    questions, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a compiler's output goes to stderr
    parts = Parts()
    for line in questions:  # not sys.stdin: commands called here set its encoding, which fails while it is being read
        try:
            said = {"answer": parts.answer(**json.loads(line))}
        except KeyboardInterrupt:  # the terminal's Ctrl-C reaches this process too; the parent reports it
            break
        except Exception as error:  # a kernel, a compiler or a driver may raise anything
            lines = str(error).strip().splitlines() or ["it says no more"]
            said = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
    os._exit(0)  # threads of an engine might keep the process alive


if __name__ == "__main__":
    main()

"""Course machinery. Lesson 9's second trace: the operations of a decode step, the gaps between them, and one call.

Times are from lessons/l9_speed/operations.json, measured on one machine by scripts/traces/operations.py. The recorder
runs a step again and checks that its operations are still those.
"""

import json
from collections.abc import Sequence
from typing import Any

from scripts.traces.operations import FIGURES, operations, step_of
from scripts.traces.tape import Tape, ask, plural

NORM = ("pow", "mean", "add", "rsqrt", "mul", "mul")
ROPE = ("mul", "neg", "cat", "mul", "add")
STORE = ("aminmax", "item", "item", "index_put_", "index_put_")
Part = tuple[str, str, tuple[str, ...]]  # its name, its kind, its operations
PLAIN: tuple[Part, ...] = (
    ("norm", "b", NORM),
    ("q", "a", ("linear",)),
    ("norm of q", "b", NORM),
    ("RoPE of q", "c", ROPE),
    ("k", "a", ("linear",)),
    ("norm of k", "b", NORM),
    ("RoPE of k", "c", ROPE),
    ("v", "a", ("linear",)),
    ("write K and V", "d", STORE),
    ("attention", "e", ("attention",)),
    ("o", "a", ("linear",)),
    ("add", "f", ("add",)),
    ("norm", "b", NORM),
    ("gate", "a", ("linear",)),
    ("SiLU", "f", ("silu",)),
    ("up", "a", ("linear",)),
    ("multiply", "f", ("mul",)),
    ("down", "a", ("linear",)),
    ("add", "f", ("add",)),
)
JOINED: tuple[Part, ...] = (
    ("norm", "b", ("rms_norm",)),
    ("q, k, v", "a", ("linear", "unflatten")),
    ("norm of q, k", "b", ("rms_norm", "mul")),
    ("RoPE of q, k", "c", (*ROPE, "copy_")),
    ("write K and V", "d", ("split_with_sizes", *STORE)),
    ("attention", "e", ("attention",)),
    ("o", "a", ("linear",)),
    ("add", "f", ("add",)),
    ("norm", "b", ("rms_norm",)),
    ("gate, up", "a", ("linear",)),
    ("SiLU, multiply", "f", ("silu", "mul")),
    ("down", "a", ("linear",)),
    ("add", "f", ("add",)),
)
LAYER = 1  # the layer to show
MODEL, FAST = "mini_engine/model", "mini_engine/layers"


class Measured:
    """One backend's step. parts: of a layer, with the index of its first operation, in the layer shown."""

    def __init__(self, name: str, figures: dict[str, Any], parts: Sequence[Part]) -> None:
        self.name, self.us = name, figures["us"]
        self.operations: list[list[Any]] = figures["operations"]
        names = [operation for _, _, part in parts for operation in part]
        self.parts, self.size = parts, len(names)
        self.layer = self.begins_of(names)[LAYER] if parts else 0

    def begins_of(self, layer: list[str]) -> list[int]:
        """Return the index of each layer's first operation.

        Raises:
            ValueError: there are no such operations.
        """
        names = [name for name, _, _ in self.operations]
        found = [at for at in range(len(names)) if names[at : at + len(layer)] == layer]
        if not found:
            raise ValueError("a layer has other operations now: measure again with python -m scripts.traces.operations")
        return found

    @property
    def count(self) -> int:
        return len(self.operations)

    @property
    def span(self) -> float:
        """µs from the first operation's begin to the last one's end, under the profiler."""
        return self.operations[-1][1] + self.operations[-1][2]

    @property
    def between(self) -> int:
        """The percentage of the span between operations."""
        return round(100 * (1 - sum(took for _, _, took in self.operations) / self.span))

    def bars(self) -> list[list[float]]:
        """The step's operations as begin and duration in µs."""
        return [[round(start), max(1, round(took))] for _, start, took in self.operations]

    def zoomed(self) -> dict[str, Any]:
        """Return the shown layer: for each part its name, its kind and the begins and durations of its operations."""
        at, begin, parts = self.layer, self.operations[self.layer][1], []
        for name, kind, names in self.parts:
            bars = [[round(start - begin, 1), took] for _, start, took in self.operations[at : at + len(names)]]
            parts.append([name, kind, bars])
            at += len(names)
        return {"parts": parts, "us": round(parts[-1][2][-1][0] + parts[-1][2][-1][1], 1)}


class Gaps(Tape):
    """Shows a step in torch, its layers, and the one call."""

    def __init__(self) -> None:
        figures = json.loads(FIGURES.read_text(encoding="utf-8"))
        named = (("reference", PLAIN), ("torch", JOINED), ("packed", ()))
        self.plain, self.joined, self.packed = steps = [Measured(name, figures[name], parts) for name, parts in named]
        scene = {
            "steps": [{"name": one.name, "us": one.us, "count": one.count, "bars": one.bars()} for one in steps],
            "layers": [one.zoomed() for one in steps if one.parts],
            "cpu": figures["machine"]["cpu"],
        }
        file, title = "l9_speed/small_operations.trace.js", "Many small operations, or one call"
        super().__init__("l9-gaps", file, "gaps", title, 6, **scene)

    def state(self) -> dict[str, Any]:
        """Return shown: the number of steps drawn; layer: the one drawn in detail; lit: its highlighted parts."""
        return {"shown": 1, "layer": 0, "lit": []}

    def count_again(self) -> None:
        """Run a step of each backend that needs no compiler. ValueError if its operations are not as measured."""
        for one in (self.plain, self.joined):
            step = step_of(one.name)
            step()  # the first one allocates
            if [name for name, _, _ in operations(step)] != [name for name, _, _ in one.operations]:
                raise ValueError(
                    f"a step of {one.name} has other operations: run python -m scripts.traces.operations again"
                )

    def record(self) -> None:
        self.count_again()
        self.whole()
        self.kinds()
        self.one_call()

    def whole(self) -> None:
        plain = self.plain
        self.show(
            f"A decode step in lesson 0's layers: {plain.count} operations. Above it, one of its layers, with "
            f"{plain.size}.",
            f"{MODEL}/decoder.py::Decoder.forward",
        )
        text = f"{plain.count} operations, one after another. How much of the step lies between them?"
        why = "Small operations take as long to be called as to be computed."
        self.show(
            f"{plain.between} % of the step lie between operations: Python and torch prepare the next one.",
            f"{MODEL}/decoder.py::DecoderLayer.forward",
            ask(text, f"{plain.between} %", ("3 %", "90 %"), why),
        )

    def kinds(self) -> None:
        """Show the kinds of operations in a layer, and those that remain without a compiler."""
        of = {kind: [i for i, part in enumerate(PLAIN) if part[1] == kind] for kind in "abcdef"}
        count = {kind: sum(len(PLAIN[i][2]) for i in found) for kind, found in of.items()}
        said = f"The {count['a']} matrix products read the weights. They are what the step is for."
        self.show(said, f"{MODEL}/qwen3.py::Qwen3Attention.forward", lit=of["a"])
        text = (
            "A norm squares, takes the mean, adds, takes the root, and multiplies twice. How many of the layer's "
            f"{self.plain.size} operations are parts of a norm?"
        )
        why = f"{len(of['b'])} norms of {len(NORM)} operations each."
        self.show(
            f"The norms: {count['b']} operations. Each norm is {len(NORM)} passes, and each pass writes a new tensor.",
            f"{MODEL}/layers.py::RMSNorm.forward",
            ask(text, count["b"], (4, 6, 12), why),
            lit=of["b"],
        )
        self.show(
            f"RoPE takes {plural(count['c'], 'operation')}, writing K and V {count['d']}, with the check that every "
            "slot exists.",
            f"{MODEL}/rope.py::apply_rope",
            lit=[*of["c"], *of["d"]],
        )
        self.show(
            f"Joined matrices and torch's own norm: {self.joined.size} operations in a layer instead of "
            f"{self.plain.size}.",
            f"{FAST}/torch_layers.py::TorchDecoderLayer.forward",
            shown=2,
            layer=1,
            lit=[i for i, part in enumerate(JOINED) if ", " in part[0] or part[0] == "norm"],
        )

    def one_call(self) -> None:
        plain, joined, packed = self.plain, self.joined, self.packed
        (took,) = [took for name, _, took in packed.operations if name == "run_layers"]
        text = f"In C++ a single call runs all layers. The step had {plain.count} operations. How many has it now?"
        why = "The rest is around the call: embedding, RoPE's tables, head."
        self.show(
            f"With C++, all layers are one call of {took:.0f} µs; around it are checks, tables and the head.",
            f"{FAST}/fast_model.py::speed_up",
            ask(text, packed.count, (1, 4, joined.count), why),
            shown=3,
            layer=1,
        )
        self.show(
            f"Unprofiled, the steps take {plain.us:,.0f}, {joined.us:,.0f} and {packed.us:,.0f} µs, for the same "
            "tokens.",
            f"{FAST}/torch_layers.py::TorchModel.forward",
            shown=3,
            layer=1,
        )

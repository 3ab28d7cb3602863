"""Course machinery. Suite `windows`: memory, requests at once, and prefixes found.

    memory    bytes of one sequence: by length, against a Qwen3 and a hybrid, and in public models with windows
    requests  the number that run at once in the same pool
    hits      prompt tokens found by interleaved chats in the same pool, by what the tree evicts first

They run the manager and the scheduler alone: counts do not depend on weights. `histories` measures decode.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench import hybrid
from scripts.bench.common import Report
from scripts.bench.options import add_choice
from scripts.bench.windows_counts import Shape, hit_rows, model_rows, request_rows, sequence_bytes
from scripts.make_random_qwen3 import SHAPES

from mini_engine.checkpoint.config import DTYPES
from mini_engine.cli.parser import whole_number

PARTS = ("memory", "requests", "hits")
WINDOW, EVERY = 1024, 4  # like lesson 11's hybrid: one layer in four sees everything


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_choice(parser, "parts", PARTS)
    parser.add_argument("--window", type=whole_number(2), default=WINDOW, metavar="W", help=f"default: {WINDOW}")


def run(args: Namespace) -> Report:
    """Measure the parts asked for, a table each."""
    shape = shape_of(args.window)
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "memory": lambda: [*length_rows(shape, args.quick), *model_rows(args.quick)],
        "requests": lambda: request_rows(shape, args.quick),
        "hits": lambda: hit_rows(shape, args.quick),
    }
    rows = [{"part": part} | row for part in args.parts for row in measure[part]()]
    note = (
        f"the 0.6B's shape, a window of {args.window} in three layers of four: a full group, {shape.num_groups} with "
        f"windows, {shape.block_bytes // 1024} KiB a block of {shape.block_size} tokens"
    )
    return Report("windows", rows, [note])


def shape_of(window: int) -> Shape:
    """Return the 0.6B's shape with windows in three layers of four."""
    sizes = SHAPES["0.6B"]
    num_layers = sizes["num_hidden_layers"]
    return Shape(
        "windows-0.6B", num_layers, num_layers // EVERY, sizes["num_key_value_heads"], sizes["head_dim"], window
    )


def length_rows(shape: Shape, quick: bool) -> list[dict[str, Any]]:
    """Return the bytes of one sequence by length: in a Qwen3, with windows, and in lesson 11's hybrid."""
    args = Namespace(model=None, shape="hybrid-0.6B", dtype="bfloat16")
    others = hybrid.memory_rows(hybrid.config_of_shape(args), DTYPES["bfloat16"])
    lengths = hybrid.LENGTHS[:4] if quick else hybrid.LENGTHS
    return [
        {
            "case": f"{length} tokens",
            "Qwen3 MiB": other["Qwen3 MiB"],
            "windows MiB": sequence_bytes(shape, length) / 2**20,
            "hybrid MiB": other["hybrid MiB"],
        }
        for length, other in zip(lengths, others, strict=False)
    ]


def draw(report: Report, path: Path) -> None:
    """Draw bytes against sequence length, both axes logarithmic."""
    words = (
        "Memory of one sequence against its length: windows follow a Qwen3's up to their width and grow a quarter as "
        "fast from there; a hybrid's begins with its state and ends below both"
    )
    rows = [row for row in report.rows if "windows MiB" in row]
    hybrid.draw_memory(rows, words, path, {"Qwen3": 0, "windows": 2, "hybrid": 1})

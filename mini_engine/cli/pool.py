"""Course machinery. The command `pool CONFIG_OR_ID`: what a model's KV cache costs, by config.json alone."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError, first_line
from mini_engine.cli.arguments import ENGINE_OPTIONS, add_fields
from mini_engine.cli.parser import memory, whole_number

if TYPE_CHECKING:
    from mini_engine.assembly.costs import Costs

LENGTHS = (1024, 4096, 32_768, 131_072)
FILES = ("config.json", "generation_config.json")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
BY_CONFIG = "by config: this engine does not run it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pool`."""
    add = parser.add_argument
    what = "a config.json, a checkpoint, or a hub id, of which only config.json is fetched"
    add("model", metavar="CONFIG_OR_ID", help=what)
    what = "a request's length, prompt and answer; repeatable (default: several up to the model's longest)"
    add("--tokens", type=whole_number(1, 2**40), action="append", metavar="N", help=what)
    what = "memory for KV, and nothing else (default: 24GiB)"
    add("--memory", type=memory, default=24 * 2**30, metavar="24GiB", help=what)
    add("--after-weights", action="store_true", help="the memory holds the weights, too: KV gets what they leave")
    what = "auto, float32, bfloat16 or float16 (default: auto: the checkpoint's own, otherwise bfloat16)"
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help=what)
    add_fields(parser, EngineConfig, {name: ENGINE_OPTIONS[name] for name in ("block_size", "kv_dtype")})
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Print what the cache costs. Returns 0. UserError: the config.json does not say it."""
    from mini_engine.assembly.costs import Costs, count_parameters
    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.cli.dtype import stored_dtype

    directory = directory_of(args.model)
    shape, build, why = shape_of(directory)
    name = args.dtype if args.dtype != "auto" else stored_dtype(directory)
    dtype = DTYPES.get(str(name), DTYPES["bfloat16"])
    costs = Costs(shape, dtype, EngineConfig(block_size=args.block_size, kv_dtype=args.kv_dtype))
    weights = count_parameters(build, shape) * dtype.itemsize if build else None
    if args.after_weights and weights is None:
        raise UserError(f"the weights cannot be counted ({BY_CONFIG}); leave out --after-weights")
    for_kv = args.memory - (weights or 0) * args.after_weights
    if for_kv < 0:
        raise UserError(f"the weights take {amount(weights or 0)} of {amount(args.memory)}; give more --memory")
    found = {"model": str(args.model), "runs": build is not None, "why": why}
    found |= {"dtype": str(dtype).removeprefix("torch."), "kv_dtype": args.kv_dtype, "block_size": args.block_size}
    found |= {"layers": [cost._asdict() for cost in costs.by_kind()], "weight_bytes": weights}
    found |= {"bytes_per_token": costs.bytes_per_token, "fixed_bytes": costs.fixed_bytes}
    found |= {"first_layer_keeps_all": costs.keeps_first_whole, "memory": args.memory, "memory_for_kv": for_kv}
    found["requests"] = requests(costs, args.tokens or lengths(shape.max_model_len), for_kv)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def directory_of(model: str) -> Path:
    """Return the directory of a config.json; of a hub id, nothing else is downloaded."""
    from mini_engine.checkpoint.directory import resolve_checkpoint

    path = Path(model)
    return path.parent if path.name == FILES[0] and path.is_file() else resolve_checkpoint(model, FILES)


def shape_of(directory: Path) -> tuple[Any, Any, str | None]:
    """Return a model's shape and the function that builds it; or None in its place, and why it does not run here."""
    from mini_engine.assembly.loading import reader_of
    from mini_engine.checkpoint.json_files import read_json
    from mini_engine.families.by_config import shape_by_config

    try:
        family = reader_of(directory)
        return family.shape(directory), family.build, None
    except UserError as error:
        shape = shape_by_config(read_json(directory / FILES[0]), directory / FILES[0])
        if shape is None:
            raise
        return shape, None, first_line(error)


def lengths(longest: int) -> Sequence[int]:
    """Return the lengths to show for a model whose longest text has so many tokens."""
    return [length for length in LENGTHS if length <= longest] or [longest]


def requests(costs: "Costs", lengths: Sequence[int], num_bytes: int) -> list[dict[str, int]]:
    """Return the bytes of one request of each length, and how many fit into the memory."""
    return [
        {"tokens": n, "bytes": costs.request_bytes(n), "at_once": costs.at_once(n, num_bytes)}
        for n in dict.fromkeys(lengths)
    ]


def amount(num_bytes: float) -> str:
    """Return bytes in a unit that leaves three or four digits."""
    unit = 0
    while num_bytes >= 1000 and unit + 1 < len(UNITS):
        num_bytes, unit = num_bytes / 1024, unit + 1
    digits = 0 if unit == 0 or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:,.{digits}f} {UNITS[unit]}"


def show(found: dict[str, Any]) -> None:
    """Print the two tables, and a sentence for what they cannot say."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    stored = "" if found["kv_dtype"] == "auto" else f", KV in {found['kv_dtype']}"
    console.print(Text(f"{found['model']}: {found['dtype']}{stored}, blocks of {found['block_size']} tokens"))
    if not found["runs"]:
        console.print(Text(BY_CONFIG, style="yellow"))
    if found["weight_bytes"] is not None:
        console.print(Text(f"weights: {amount(found['weight_bytes'])}"))
    console.print()
    console.print(table_of(["layers", "keep", "bytes a token", "fixed for a request"], map(layer_row, found["layers"])))
    for line in notes(found):
        console.print(Text(line, style="dim"))
    console.print()
    left = found["memory_for_kv"]
    counted = "KV only" if left == found["memory"] else f"{amount(left)} of it for KV"
    rows = [[f"{one['tokens']:,}", amount(one["bytes"]), f"{one['at_once']:,}"] for one in found["requests"]]
    fit = f"fit into {amount(found['memory'])} ({counted})"
    console.print(table_of(["tokens of a request", "it holds", fit], rows, texts=0))


def layer_row(cost: dict[str, Any]) -> list[str]:
    """Return the cells of one kind of layer."""
    kept = {
        "full": "K and V of every token",
        "window": f"K and V of the last {cost['window'] or 0:,} tokens",
        "latent": "a latent of every token",
        "state": "a state",
    }
    fixed = "–" if cost["fixed_bytes"] is None else amount(cost["fixed_bytes"])
    per_token = f"{cost['bytes_per_token']:,}" if cost["bytes_per_token"] else "–"
    return [f"{cost['layers']} {cost['kind']}", kept[cost["kind"]], per_token, fixed]


def notes(found: dict[str, Any]) -> list[str]:
    """Return sentences about windows: the first layer's, and room that their last group leaves empty."""
    said = []
    if found["first_layer_keeps_all"]:
        said.append("The first layer has a window, too, but is kept whole, so that prefixes are found.")
    if unused := sum(cost["unused"] for cost in found["layers"]):
        said.append(f"{unused:,} bytes a token of the windows are empty: their last group has fewer layers.")
    return said


def table_of(titles: Sequence[str], rows: Any, texts: int = 2) -> Any:
    """Return a table whose first `texts` columns are text; the others are figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

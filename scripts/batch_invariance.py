"""Lesson 5. Checks which parts of the model give a token the same bits, whatever else is in the batch.

For each part, a row is computed alone and then in a larger batch; "equal" means that every bit is. Results that are not
equal differ by rounding: the sums are added in another order. The chosen tokens agree as long as the gaps between
logits are wider than that.
"""

import sys
from array import array

from scripts.smoke.arguments import pick_device
from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard

COUNTS = (2, 3, 4, 8, 16, 64)
BLOCK_SIZE = 16
PROMPT_TOKENS = 100


def run(args) -> int:
    import torch

    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.families.qwen3 import load_model
    from mini_engine.pocket import POCKET_DIR

    device = pick_device(args.device)
    report = {}
    for name in ("float32", "bfloat16"):
        model = load_model(args.model or POCKET_DIR, DTYPES[name], device)
        with torch.inference_mode():
            report[name] = check_model(model, args.kernel)
    if args.json:
        print_json({"device": device, "row_counts": COUNTS, "results": report})
        return 0
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads. One row alone and among n rows;")
    print("a prompt at once and in chunks of n:")
    print_report(report)
    return 0


def print_report(report: dict[str, dict[str, list[bool]]]) -> None:
    """Print a table for each dtype: a row for each part, a column for each of COUNTS."""
    from rich.console import Console

    from lessons._course.tables import Column, show

    for name, parts in report.items():
        print()
        rows = [[part, *("equal" if same else "no" for same in found)] for part, found in parts.items()]
        show(Console(highlight=False), [Column(name, is_text=True), *(Column(f"n = {n}") for n in COUNTS)], rows)


def check_model(model, kernel: str) -> dict[str, list[bool]]:
    """Return, for each part, whether its results are equal for each of COUNTS."""
    layer = model.model.layers[0]
    linears = {
        "q_proj": layer.self_attn.q_proj.weight,
        "o_proj": layer.self_attn.o_proj.weight,
        "gate_proj": layer.mlp.gate_proj.weight,
        "down_proj": layer.mlp.down_proj.weight,
        "the vocabulary head": model.head_weight,
    }
    parts = {f"{name} {list(reversed(w.shape))}": linear(w) for name, w in linears.items()}
    parts["RMSNorm"] = norm(layer.input_layernorm)
    names = ["torch", "cpu"] if kernel == "auto" and model.device.type == "cpu" else [kernel]
    for name in names:
        parts |= whole_model(model, name)
    return parts


def rows_like(weight, count: int):
    """Return `[count, in_features]` random rows in the weight's dtype and on its device."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, weight.shape[-1], generator=generator).to(weight)


def same_rows(compute, rows) -> list[bool]:
    """Return, for each n of COUNTS, whether the first rows are the same alone and in a batch of n rows."""
    import torch

    alone = [compute(rows[i : i + 1])[0] for i in range(min(COUNTS[0], len(rows)))]
    return [all(torch.equal(x, compute(rows[:n])[i]) for i, x in enumerate(alone)) for n in COUNTS]


def linear(weight) -> list[bool]:
    import torch.nn.functional as F

    return same_rows(lambda x: F.linear(x, weight), rows_like(weight, COUNTS[-1]))


def norm(module) -> list[bool]:
    return same_rows(module, rows_like(module.weight, COUNTS[-1]))


def whole_model(model, kernel: str) -> dict[str, list[bool]]:
    """Check a decode step over histories of 5 to 60 tokens (attention and logits) and a prompt in chunks."""
    import torch

    from mini_engine.attention.registry import load_kernel
    from mini_engine.kv.allocator import BlockAllocator
    from mini_engine.kv.block_tensor import KvPool, plan_packed

    num_blocks = COUNTS[-1] * 5 + 1
    attend = load_kernel(kernel, model.device, model.dtype)
    pool = KvPool(model.config, num_blocks, BLOCK_SIZE, attend, model.dtype, model.device)
    requests = decoding(model, pool, BlockAllocator(num_blocks, BLOCK_SIZE))
    q = rows_like(
        torch.empty(1, model.config.head_dim).to(model.device, model.dtype),
        COUNTS[-1] * model.config.num_attention_heads,
    )
    q = q.view(COUNTS[-1], model.config.num_attention_heads, -1)

    def attention(some):
        return pool.attend(0, q[: len(some)], plan_packed(some, BLOCK_SIZE, pool.device))

    def logits(some):
        fed = torch.tensor([request.token_ids[-1] for request in some], device=pool.device)
        return model(fed, pool, plan_packed(some, BLOCK_SIZE, pool.device))

    return {
        f"attention, {attend.name} kernel": same_first(attention, requests),
        f"logits, {attend.name} kernel": same_first(logits, requests),
        f"a prompt in chunks, {attend.name} kernel": same_chunks(model, pool),
    }


def decoding(model, pool, allocator) -> list:
    """Return lesson 3's requests, each with its prompt already computed on its own and one token left to feed."""
    from lessons.l3_block_tensor.packed import step
    from mini_engine.kv.block_table import BlockTable
    from mini_engine.kv.block_tensor import PackedRequest

    requests = [PackedRequest([3 + i % 40] * (5 + 7 * i % 56), BlockTable(allocator)) for i in range(COUNTS[-1])]
    for request in requests:
        step(model, pool, [request], BLOCK_SIZE)
        request.table.append(1)
    return requests


def same_chunks(model, pool) -> list[bool]:
    """Return, for each n of COUNTS, whether a prompt's logits are the same in one piece and in chunks of n."""
    import torch

    from mini_engine.engine.request import Request
    from mini_engine.engine.runner import ModelRunner
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import Chunk

    prompt = [3 + i % 40 for i in range(PROMPT_TOKENS)]
    request = Request("prompt", prompt, SamplingParams())
    blocks = array("i", range(1, PROMPT_TOKENS // BLOCK_SIZE + 2))

    def logits(size):
        starts = range(0, PROMPT_TOKENS, size)
        chunks = [Chunk(request, start, min(start + size, PROMPT_TOKENS), blocks) for start in starts]
        return [ModelRunner(model, pool).run([chunk]) for chunk in chunks][-1]

    whole = logits(PROMPT_TOKENS)
    return [torch.equal(whole, logits(n)) for n in COUNTS]


def same_first(compute, requests) -> list[bool]:
    """Return, for each n of COUNTS, whether the first request's row is the same alone and in a batch of n."""
    import torch

    alone = compute(requests[:1])[0]
    return [torch.equal(alone, compute(requests[:n])[0]) for n in COUNTS]


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    parser.add_argument(
        "--kernel", default="auto", metavar="NAME", help="auto, reference, blockwise, torch, cpu or triton"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())

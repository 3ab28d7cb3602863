"""Lesson 5. Measures how long decoding requests wait for their next token when a long prompt arrives.

First as in lesson 3: all prompts and decodes share one packed step, no matter how long it takes. Then with the
scheduler, which computes the prompt in chunks within a step's token budget. A gap is the time between two tokens of one
answer.
"""

import sys
import time

from scripts.smoke.arguments import pick_device
from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard, whole_number

BLOCK_SIZE = 16


def run(args) -> int:
    from mini_engine.families.qwen3 import load_model
    from mini_engine.pocket import POCKET_DIR

    args.device = pick_device(args.device)
    model = load_model(POCKET_DIR, device=args.device)
    prompts = [[1 + i, 2, 3] for i in range(args.decoders)]
    long_prompt = [7 + i % 1000 for i in range(args.prompt_tokens)]
    model.config.check_prompt(long_prompt, 1)
    reports = {}
    if args.lesson != 5:
        reports["lesson 3, one step"] = packed(model, prompts, long_prompt, args)
    for budget in [] if args.lesson == 3 else args.budget or [64, 256, 1024]:
        reports[f"chunks, {budget} tokens a step"] = chunked(model, prompts, long_prompt, budget, args)
    if args.json:
        print_json(reports)
        return 0
    print(f"{args.decoders} requests decode; a prompt of {args.prompt_tokens} tokens arrives ({args.device}, float32)")
    print_reports(reports)
    return 0


def print_reports(reports: dict[str, dict]) -> None:
    from rich.console import Console

    from lessons._course.tables import Column, show

    titles = ("largest gap", "usual gap", "wait for first token")
    rows = []
    for name, r in reports.items():
        largest, usual, first = (f"{r[what]:.0f} ms" for what in ("largest_gap_ms", "usual_gap_ms", "first_token_ms"))
        rows.append([name, f"{r['largest_gap_steps']} step, {largest}", usual, first])
    show(Console(highlight=False), [Column("", is_text=True), *map(Column, titles)], rows)


def packed(model, prompts, long_prompt, args) -> dict:
    """Run lesson 3's steps, adding the long prompt to the running batch halfway."""
    import torch

    from lessons.l3_block_tensor.packed import step
    from mini_engine.attention.registry import load_kernel
    from mini_engine.kv.allocator import BlockAllocator
    from mini_engine.kv.block_table import BlockTable
    from mini_engine.kv.block_tensor import KvPool, PackedRequest

    num_blocks = blocks_for(args)
    pool = KvPool(model.config, num_blocks, BLOCK_SIZE, load_kernel("auto", args.device), device=args.device)
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
    running = [PackedRequest(list(ids), BlockTable(allocator)) for ids in prompts]
    clock = Clock(args.device)
    with torch.inference_mode():
        for number in range(args.steps):
            if number == args.steps // 2:
                running.append(PackedRequest(long_prompt, BlockTable(allocator)))
                clock.arrived()
            step(model, pool, running, BLOCK_SIZE)
            clock.tick(range(len(running)))
    return clock.report()


def chunked(model, prompts, long_prompt, budget, args) -> dict:
    """Do the same with lesson 5's engine, which computes the prompt in chunks of at most `budget` tokens."""
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler_config import SchedulerConfig

    limits = SchedulerConfig(max_num_seqs=len(prompts) + 1, max_num_batched_tokens=budget, chunked_prefill_size=budget)
    engine = Engine.for_model(model, num_blocks=blocks_for(args), block_size=BLOCK_SIZE, scheduler_config=limits)
    params = SamplingParams(temperature=0, max_tokens=args.steps + len(long_prompt), ignore_eos=True)
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), ids, params)
    clock = Clock(args.device)
    while len(clock.times) < args.steps or len(prompts) not in clock.last:
        if len(clock.times) == args.steps // 2:
            engine.add_request(str(len(prompts)), long_prompt, SamplingParams(temperature=0, max_tokens=args.steps))
            clock.arrived()
        clock.tick(int(name) for name in engine.step().new_tokens)
    return clock.report()


def blocks_for(args) -> int:
    return (args.decoders + 1) * (args.steps + args.prompt_tokens) // BLOCK_SIZE + args.decoders + 3


class Clock:
    """Records when each request gets its tokens."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: list[float] = []
        self.gaps: list[tuple[int, float]] = []
        self.last: dict[int, int] = {}
        self.began = self.first_token = 0.0

    def now(self) -> float:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def arrived(self) -> None:
        self.began = self.now()

    def tick(self, names) -> None:
        """Record the end of a step in which the requests `names` got a token each."""
        self.times.append(self.now())
        step = len(self.times) - 1
        for name in names:
            if name in self.last:
                self.gaps.append((step - self.last[name], self.times[step] - self.times[self.last[name]]))
            elif self.began and not self.first_token:
                self.first_token = self.times[step]
            self.last[name] = step

    def report(self) -> dict:
        seconds = sorted(gap for _, gap in self.gaps)
        return {
            "largest_gap_steps": max(steps for steps, _ in self.gaps),
            "largest_gap_ms": 1000 * seconds[-1],
            "usual_gap_ms": 1000 * seconds[len(seconds) // 2],
            "first_token_ms": 1000 * (self.first_token - self.began),
        }


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--lesson", type=int, choices=[3, 5], help="run only this lesson's version (default: both)")
    parser.add_argument(
        "--decoders", type=whole_number(1), default=15, metavar="N", help="requests that decode (default: 15)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=whole_number(1),
        default=4000,
        metavar="N",
        help="length of the long prompt (default: 4000)",
    )
    parser.add_argument(
        "--steps", type=whole_number(4), default=40, metavar="N", help="steps to run, at least (default: 40)"
    )
    parser.add_argument(
        "--budget",
        type=whole_number(1),
        action="append",
        metavar="N",
        help="tokens per step (default: 64, 256 and 1024); repeatable",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())

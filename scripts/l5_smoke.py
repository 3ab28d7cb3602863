"""Lesson 5. Prompts arrive one by one at a pool too small for all; each answer must equal the one it gets alone."""

import sys

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import make_parser, with_prompts
from scripts.smoke.run import Outcome, run_smoke
from scripts.smoke.steps import steps_of

from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.stats import Summary

LONG_PROMPTS = (
    "1 times 7 is 7. 2 times 7 is 14. 3 times 7 is 21. 4 times 7 is 28. 5 times 7 is 35. 6 times 7 is 42.",
    "Once upon a time there was a brave bear named Bruno. He lived in a quiet forest. One morning Bruno went for a "
    "walk and found a shiny key. He did not know what to do with it, so he asked an old owl.",
)
PROMPTS = (*COURSE_PROMPTS[8:16], *LONG_PROMPTS, *COURSE_PROMPTS[18:])  # twenty, of 3 to 58 tokens


def generate(model, prompts, args) -> Outcome:
    """Add a prompt every few steps until all have answers. Requests that do not fit wait or are preempted."""
    needs = [-(-(len(ids) + args.max_new_tokens - 1) // args.block_size) for ids in prompts]
    num_blocks = args.num_blocks or 1 + max(*needs, sum(needs) // 4)  # a quarter, but enough for the largest
    most = {"max_num_batched_tokens": args.max_num_batched_tokens, "chunked_prefill_size": args.chunk_size}
    limits = SchedulerConfig(min(64, args.max_num_batched_tokens), watermark=0, **most)  # admit everything that fits
    options = {"num_blocks": num_blocks, "block_size": args.block_size, "kernel": args.kernel}
    engine = Engine.for_model(model, scheduler_config=limits, **options)
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    requests, summary = [engine.add_request("0", prompts[0], params)], Summary()
    for result in steps_of(engine, num_requests=len(prompts)):
        summary.add_step(result.stats)
        if summary.num_steps % args.every == 0 and len(requests) < len(prompts):
            requests.append(engine.add_request(str(len(requests)), prompts[len(requests)], params))
    faults = [f"request {r.id} ended with an error: {r.error}" for r in requests if r.error]
    if held := engine.scheduler.manager.blocks_by_state.held:
        faults.append(f"{held} blocks are still held, although every request has ended")
    outcome = Outcome([r.output_ids for r in requests], figures(engine, requests, summary), faults)
    return outcome.exercising(summary.num_preemptions, "no request was preempted")


def figures(engine, requests, summary) -> dict:
    manager = engine.scheduler.manager
    return {
        "layout": "block-tensor",
        "bytes": engine.runner.pool.bytes,
        "blocks": manager.num_usable_blocks,
        "block_size": manager.block_size,
        "free_at_end": manager.num_free_blocks,
        "steps": summary.num_steps,
        "most_running": summary.most_running,
        "preemptions": summary.num_preemptions,
        "preempted_requests": sum(r.num_preemptions > 0 for r in requests),
        "prefill_tokens": summary.prefill_tokens,
        "decode_tokens": summary.decode_tokens,
    }


def arguments():
    parser = make_parser(__doc__, block_size=8, kernel=True)
    one, tokens = {"type": whole_number(1), "metavar": "N"}, "(default: 32)"
    blocks = {"type": whole_number(2), "metavar": "N", "help": "with the null block; default: 1/4 of the need"}
    parser.add_argument("--num-blocks", **blocks)
    parser.add_argument("--every", default=2, help="steps per arrival (default: 2)", **one)
    parser.add_argument("--max-num-batched-tokens", default=32, help=f"tokens per step {tokens}", **one)
    parser.add_argument("--chunk-size", default=32, help=f"tokens per prompt and step {tokens}", **one)
    return parser


def main(argv=None) -> int:
    parser = arguments()
    return run_smoke(5, generate, parser, with_prompts(argv, parser, PROMPTS))


if __name__ == "__main__":
    sys.exit(main())

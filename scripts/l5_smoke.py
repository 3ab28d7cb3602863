"""Lesson 5. Prompts arrive one by one at a pool too small for all; each answer must equal the one it gets alone."""

import sys

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


def default_prompts() -> list[str]:
    """Return twenty prompts of 3 to 58 tokens, with the long ones in the middle."""
    from scripts.pocket.prompts import COURSE_PROMPTS

    return [*COURSE_PROMPTS[8:16], *LONG_PROMPTS, *COURSE_PROMPTS[18:]]


def generate(model, prompts, args) -> Outcome:
    """Add a prompt every few steps until all have answers. Requests that do not fit wait or are preempted."""
    num_blocks = args.num_blocks or blocks_for(prompts, args) + 1  # plus the null block
    limits = SchedulerConfig(
        max_num_seqs=min(64, args.max_num_batched_tokens),
        max_num_batched_tokens=args.max_num_batched_tokens,
        chunked_prefill_size=args.chunk_size,
        watermark=0,  # admit everything that fits: this script wants preemptions
    )
    engine = Engine.for_model(
        model, num_blocks=num_blocks, block_size=args.block_size, kernel=args.kernel, scheduler_config=limits
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    requests, summary = [engine.add_request("0", prompts[0], params)], Summary()
    for result in steps_of(engine, num_requests=len(prompts)):
        summary.add_step(result.stats)
        if summary.num_steps % args.every == 0 and len(requests) < len(prompts):
            requests.append(engine.add_request(str(len(requests)), prompts[len(requests)], params))
    errors = [f"request {r.id} ended with an error: {r.error}" for r in requests if r.error]
    outcome = Outcome([r.output_ids for r in requests], figures(engine, requests, summary), errors + leaks(engine))
    return outcome.exercising(summary.num_preemptions, "no request was preempted")


def blocks_for(prompts, args) -> int:
    """Return a quarter of the blocks that all prompts need together, but enough for the largest."""
    needs = [-(-(len(ids) + args.max_new_tokens - 1) // args.block_size) for ids in prompts]
    return max(max(needs), sum(needs) // 4)


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


def leaks(engine) -> list[str]:
    held = engine.scheduler.manager.blocks_by_state.held
    return [f"{held} blocks are still held, although every request has ended"] if held else []


def arguments():
    parser = make_parser(__doc__, block_size=8, kernel=True)
    parser.add_argument(
        "--num-blocks", type=whole_number(2), metavar="N", help="with the null block; default: 1/4 of the need"
    )
    parser.add_argument("--every", type=whole_number(1), default=2, metavar="N", help="steps per arrival (default: 2)")
    parser.add_argument(
        "--max-num-batched-tokens", type=whole_number(1), default=32, metavar="N", help="tokens per step (default: 32)"
    )
    parser.add_argument(
        "--chunk-size", type=whole_number(1), default=32, metavar="N", help="tokens per prompt and step (default: 32)"
    )
    return parser


def main(argv=None) -> int:
    parser = arguments()
    return run_smoke(5, generate, parser, with_prompts(argv, parser, default_prompts()))


if __name__ == "__main__":
    sys.exit(main())

"""Lesson 2. Generates with token-flat paging and compares the tokens with Hugging Face's generate."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.cli.parser import whole_number
from mini_engine.engine.loop import generate as run_loop
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.token_flat import FlatKvPool, FlatRequest, PagedSequence


def generate(model, prompts, args) -> Outcome:
    """Run the prompts one after another on one pool; each returns its blocks when it ends."""
    pool = FlatKvPool(model.config, args.num_slots, model.dtype, args.device)
    allocator = BlockAllocator.for_slots(args.num_slots, args.block_size)
    outputs, most = [], 0
    for ids in prompts:
        sequence = PagedSequence(FlatRequest(ids), pool, allocator)
        outputs.append(run_loop(model, pool, sequence, ids, args.max_new_tokens, model.config.eos_token_ids))
        most = max(most, len(sequence.request.blocks))
        sequence.release()
    kv = {"layout": "token-flat", "bytes": pool.bytes, "blocks": allocator.num_blocks, "most_held": most}
    return Outcome(outputs, kv | {"block_size": args.block_size, "free_at_end": allocator.num_free})


def arguments():
    parser = make_parser(__doc__, block_size=16)
    parser.add_argument(
        "--num-slots", type=whole_number(1), default=8192, metavar="N", help="slots in the pool (default: 8192)"
    )
    return parser


def main(argv=None) -> int:
    return run_smoke(2, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

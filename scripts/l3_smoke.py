"""Lesson 3. Generates for all prompts in packed steps with a paged-attention kernel; compares with Hugging Face."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from lessons.l3_block_tensor.packed import generate_packed
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.cli.parser import whole_number
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_tensor import KvPool


def generate(model, prompts, args) -> Outcome:
    """Run all prompts at once on one pool, with the kernel named by `--kernel`."""
    size, dtype = args.block_size, model.dtype
    if args.num_slots % size:
        raise UserError(f"--num-slots {args.num_slots} is not a multiple of --block-size {size}; use a multiple")
    num_blocks = args.num_slots // size + 1  # plus the null block
    kernel = load_kernel(args.kernel, args.device, dtype)
    pool = KvPool(model.config, num_blocks, size, kernel, dtype, args.device)
    allocator = BlockAllocator(num_blocks, size)
    outputs = generate_packed(model, pool, allocator, prompts, args.max_new_tokens, model.config.eos_token_ids)
    kv = {"layout": "block-tensor", "bytes": pool.bytes, "blocks": allocator.num_usable, "block_size": size}
    return Outcome(outputs, kv | {"kernel": args.kernel, "free_at_end": allocator.num_free})


def arguments():
    parser = make_parser(__doc__, block_size=16, kernel=True)
    parser.add_argument(
        "--num-slots", type=whole_number(1), default=8192, metavar="N", help="slots for tokens (default: 8192)"
    )
    return parser


def main(argv=None) -> int:
    return run_smoke(3, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

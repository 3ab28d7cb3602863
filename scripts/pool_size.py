"""Lesson 2. Computes how many tokens fit in a KV pool, from a model's shape and a memory budget."""

import sys

from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard, memory, whole_number


def arguments():
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="take the shape from this checkpoint's config.json")
    parser.add_argument("--layers", type=whole_number(1), default=36, help="layers (default: 36, as in Qwen3-8B)")
    parser.add_argument("--kv-heads", type=whole_number(1), default=8, help="key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=whole_number(1), default=128, help="elements of each head (default: 128)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument(
        "--memory", type=memory, default=14 * 2**30, metavar="14GiB", help="memory for KV (default: 14GiB)"
    )
    parser.add_argument("--block-size", type=whole_number(1), default=16, help="slots in a block (default: 16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(args) -> int:
    from mini_engine.checkpoint.config import DTYPES, Qwen3Config
    from mini_engine.checkpoint.directory import resolve_checkpoint
    from mini_engine.kv.token_flat import pool_slots

    if args.model:
        config = Qwen3Config.from_dir(resolve_checkpoint(args.model))
    else:  # only the number of layers, key/value heads and head_dim matter for KV
        config = Qwen3Config(1, 1, 1, args.layers, args.kv_heads, args.kv_heads, args.head_dim)
    dtype = DTYPES[args.dtype]
    per_token, slots = config.kv_bytes_per_token(dtype), pool_slots(config, dtype, args.memory, args.block_size)
    if args.json:
        print_json({"bytes_per_token": per_token, "slots": slots, "blocks": slots // args.block_size})
        return 0
    print(
        f"a token takes 2 x {config.num_key_value_heads} heads x {config.head_dim} x {config.num_hidden_layers} layers "
        f"x {dtype.itemsize} bytes = {per_token:,} bytes ({per_token / 1024:g} KiB)"
    )
    print(
        f"{args.memory / 2**30:g} GiB hold {slots:,} tokens, {slots // args.block_size:,} blocks of {args.block_size}"
    )
    return 0


def main(argv=None) -> int:
    return guard(arguments(), run, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Lesson 1. Generate with a contiguous KV cache and compare the tokens with Hugging Face's."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.cli.parser import whole_number
from mini_engine.engine.loop import generate as run_loop
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv, reusable_prefix


def generate(model, prompts, args) -> Outcome:
    """Run each prompt in its own cache, or all of them in one cache with `--reuse`."""
    outputs, kv = [], {"layout": "contiguous", "bytes": 0, "used_bytes": 0}
    for group in [prompts] if args.reuse else [[ids] for ids in prompts]:
        answers, sequence, reused = run_in_one_cache(model, group, args)
        outputs += answers
        kv["bytes"] += sequence.kv.bytes
        kv["used_bytes"] += sequence.cur_len * model.config.kv_bytes_per_token(model.dtype)
        if args.reuse:
            kv["reused_tokens"] = reused
    return Outcome(outputs, kv)


def run_in_one_cache(model, prompts, args) -> tuple[list[list[int]], CachedSequence, int]:
    """Answer prompts one after the other in one cache; each keeps the prefix that it shares with the previous text.

    Returns:
        the answers, the cached sequence, and the number of prompt tokens that did not have to be computed.
    """
    rows = args.max_seq_len or max(map(len, prompts)) + args.max_new_tokens
    sequence = CachedSequence(ContiguousKv(model.config, rows, model.dtype, args.device))
    outputs, text, reused = [], [], 0
    for ids in prompts:
        sequence.truncate(reusable_prefix(text[: sequence.cur_len], ids))
        reused += sequence.cur_len
        outputs.append(run_loop(model, sequence.kv, sequence, ids, args.max_new_tokens, model.config.eos_token_ids))
        text = ids + outputs[-1]
    return outputs, sequence, reused


def arguments():
    parser = make_parser(__doc__)
    parser.add_argument("--max-seq-len", type=whole_number(1), metavar="N", help="rows of a cache (default: as needed)")
    parser.add_argument("--reuse", action="store_true", help="one cache for all prompts: each keeps what it can reuse")
    return parser


def main(argv=None) -> int:
    return run_smoke(1, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

"""Lesson 1. A contiguous KV cache, beside Hugging Face's generate: the tokens are equal."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.cli.parser import whole_number
from mini_engine.engine.loop import generate as run_loop
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv


def generate(model, prompts, args) -> Outcome:
    """Each prompt in a cache of its own, `--max-seq-len` rows or just as many as it needs."""
    outputs, reserved, used = [], 0, 0
    per_token = model.config.kv_bytes_per_token(model.dtype)
    for ids in prompts:
        rows = args.max_seq_len or len(ids) + args.max_new_tokens
        kv = ContiguousKv(model.config, rows, model.dtype, args.device)
        sequence = CachedSequence(kv)
        outputs.append(run_loop(model, kv, sequence, ids, args.max_new_tokens, model.config.eos_token_ids))
        reserved, used = reserved + kv.bytes, used + sequence.cur_len * per_token
    return Outcome(outputs, kv={"layout": "contiguous", "bytes": reserved, "used_bytes": used})


def arguments():
    parser = make_parser(__doc__)
    parser.add_argument("--max-seq-len", type=whole_number(1), metavar="N", help="rows reserved for each request")
    return parser


def main(argv=None) -> int:
    return run_smoke(1, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

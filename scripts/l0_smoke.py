"""Lesson 0. Generate with no cache and compare the tokens with Hugging Face's."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.engine.loop import generate as run_loop
from mini_engine.kv.no_cache import NoCache, Recompute


def generate(model, prompts, args) -> Outcome:
    """Run one prompt after the other; every step feeds the whole sequence."""
    kv = NoCache()
    outputs = [
        run_loop(model, kv, Recompute(args.device), ids, args.max_new_tokens, model.config.eos_token_ids)
        for ids in prompts
    ]
    return Outcome(outputs, kv={"layout": "none", "bytes": kv.bytes})


def arguments():
    return make_parser(__doc__)


def main(argv=None) -> int:
    return run_smoke(0, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

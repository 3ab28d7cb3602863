"""Lesson 20. Agents that wait for tools while a crowd evicts, under every policy: the same tokens.

`--model` also takes hybrids, windows and latents: pocket-hybrid, pocket-windows, pocket-latent.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke import agent_paths as paths
from scripts.smoke.agents import Agents
from scripts.smoke.arguments import make_parser, with_prompts
from scripts.smoke.paths import CHUNK, batched
from scripts.smoke.run import run_smoke
from scripts.smoke.scenarios import run_scenarios
from scripts.smoke.trial import Opened, Trial

from mini_engine.assembly.loading import load

TLRU = {"eviction_policy": "tlru", "tlru_threshold": 64, "tlru_next_prompt_estimate": 32}
OFF = {"enable_sessions": False}
PATHS = {"sessions": partial(paths.crowded, survives=True), "sessions, tlru": partial(paths.crowded, **TLRU)}
PATHS |= {name: partial(paths.crowded, eviction_policy=name, **OFF) for name in ("lru", "slru")}
PATHS |= {"tlru": partial(paths.crowded, **TLRU, **OFF)}
PATHS |= {"alone": paths.alone, "batched": paths.together, "chunked": partial(paths.together, chunk=CHUNK)}
PATHS |= {"preempted": partial(paths.together, preempt=True, chunk=CHUNK), "forked": paths.forked}
PATHS |= {"last resort": paths.last_resort, "compacted": paths.compacted, "closed": paths.closed}
PATHS |= {"host memory": paths.host, "longest prefix first": paths.longest_prefix_first}


def generate(model, prompts, args):
    """Run every path; all requests of each are compared."""
    return run_scenarios(PATHS, Agents, model, prompts, args)


def one_alone(model, prompts, args):
    """Answer the prompts, to find where values differ."""
    return batched(Trial("prompts", args, prompts, Opened(), model))


def arguments():
    return make_parser(__doc__, block_size=8, load_model=load)


def main(argv=None) -> int:
    argv = with_prompts(argv, arguments(), COURSE_PROMPTS[-3:])
    return run_smoke(20, generate, arguments(), argv, one_alone)


if __name__ == "__main__":
    sys.exit(main())

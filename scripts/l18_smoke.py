"""Lesson 18. One model over several processes, in every way that lessons 5 to 17 run a model: the same tokens.

`--model` also takes hybrids, windows and latents: pocket-hybrid, pocket-windows, pocket-latent.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.paths import alone, batched, cached, chunked, guesses, preempted, rounded
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.tiers import disk, host
from scripts.smoke.trial import Trial

from mini_engine.assembly.build import over_ranks, start_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.config import DTYPES
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.engine import Engine
from mini_engine.gpu.graphs import no_graph


class OverRanks(Trial):
    """Engines over the same ranks, each with empty pools. The first one starts the ranks."""

    room = 3

    def start(self) -> Ranks:
        config = EngineConfig(tensor_parallel_size=self.args.tp, backend=self.args.backend)
        ranks, _ = start_ranks(self.args.model, config, DTYPES[self.args.dtype])
        return self.opened.stack.enter_context(ranks)

    def engine(self, capture=None, **options) -> Engine:
        ranks, config = self.opened.once("ranks", self.start), EngineConfig(**self.options(**options))
        identity = identity_of(self.model, config) if config.needs_identity else None
        return over_ranks(ranks, config, identity, capture)

    def outcome(self, engine, requests) -> Outcome:
        done, count = super().outcome(engine, requests), self.args.tp
        done.kv = {"layout": f"block-tensor over {count} ranks", "bytes": count * engine.runner.pool.bytes}
        return done


def from_one(trial: Trial) -> Outcome:
    """Let one process fill a directory, and all ranks read it: a record is the same for any number of ranks."""
    return disk(trial, trial.one_process)


PATHS = {"alone": alone, "batched": batched, "chunked": chunked, "preempted": preempted, "cached": cached}
PATHS |= {"padded": partial(batched, capture=no_graph), "guesses": guesses}
PATHS |= {kv_dtype: partial(rounded, kv_dtype=kv_dtype) for kv_dtype in ("int8", "int4")}
PATHS |= {"host": host, "disk": from_one}


def arguments():
    counts = {"--tp": (2, "processes of one model")}
    parser = make_parser(__doc__, block_size=8, counts=counts, load_model=load, device="cpu")  # where the ranks run
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, reference, torch or packed layers")
    return parser


def main(argv=None) -> int:
    return run_paths(18, OverRanks, PATHS, arguments(), argv, [long_prompt(6), *COURSE_PROMPTS[-3:]])


if __name__ == "__main__":
    sys.exit(main())

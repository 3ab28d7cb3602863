"""Lesson 18. One model over several processes, in every way that lessons 5 to 17 run a model: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
`--model` also takes hybrids, windows and latents: pocket-hybrid, pocket-windows, pocket-latent.
"""

import sys
from contextlib import ExitStack, contextmanager
from typing import Any

from scripts import first_line
from scripts.l12_smoke import temporary
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, add_all, answers, lost_blocks, run_several
from scripts.smoke.steps import steps_of

from mini_engine.assembly.build import build_engine, over_ranks, start_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.cli.parser import whole_number
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.store import BlockStore

ALONE = "alone"
CHUNK, MAX_NUM_SEQS = 7, 4
LARGE = 2**28  # bytes of a tier
LONG = "Once upon a time there was a brave bear named Bruno. " * 6 + "The capital of France is"
PATHS = ("batched", "chunked", "preempted", "cached", "padded", "guesses", "int8", "int4", "host", "disk")


class Paths:
    """State that the paths share: the ranks, started by the first path and ended with the script."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.ranks: Ranks | None = None

    def engine(self, model, prompts, args, capture: Any = None, **options) -> Engine:
        """Return an engine over all ranks, with empty pools that hold all prompts."""
        if self.ranks is None:
            config = EngineConfig(tensor_parallel_size=args.tp, backend=args.backend)
            self.ranks = self.stack.enter_context(start_ranks(args.model, config, model.dtype)[0])
        config = EngineConfig(**options_for(prompts, args, **options))
        return over_ranks(self.ranks, config, identity_of(model, config), capture)

    def alone(self, model, prompts, args) -> Outcome:
        """Run the prompts one after another over all ranks, without prefix caching."""
        engine = self.engine(model, prompts, args, enable_prefix_caching=False)
        done = outcome(engine, [answers(engine, [ids], args)[0] for ids in prompts])
        size = args.tp * engine.runner.pool.bytes
        done.kv |= {"layout": f"block-tensor over {args.tp} ranks", "bytes": size}
        return done

    def batched(self, model, prompts, args, **options) -> Outcome:
        """Run all prompts together."""
        engine = self.engine(model, prompts, args, **options)
        return outcome(engine, answers(engine, prompts, args))

    def chunked(self, model, prompts, args) -> Outcome | LeftOut:
        """Run all prompts together, a few tokens of a prompt a step."""
        if all(len(ids) <= CHUNK for ids in prompts):
            return "no prompt is longer"
        return self.batched(model, prompts, args, chunk=CHUNK)

    def preempted(self, model, prompts, args) -> Outcome:
        """Take back the blocks of the newest request every few steps."""
        engine = self.engine(model, prompts, args, chunk=CHUNK)
        outputs = answers(engine, prompts, args, preempt=True)
        return outcome(engine, outputs).exercising(engine.scheduler.num_preemptions, "no request was preempted")

    def cached(self, model, prompts, args) -> Outcome:
        """Run the prompts twice: the second time every whole block of a prompt is there."""
        engine = self.engine(model, prompts, args)
        answers(engine, prompts, args)
        stats = cache_of(engine.scheduler.manager).prefixes.stats
        before = stats.found_tokens
        outputs = answers(engine, prompts, args, name="again")
        return outcome(engine, outputs).exercising(stats.found_tokens > before, "no prompt found a prefix")

    def padded(self, model, prompts, args) -> Outcome:
        """Run decode steps as lesson 10 captures them, with rows of padding."""
        return self.batched(model, prompts, args, capture=no_graph)

    def guesses(self, model, prompts, args) -> Outcome:
        """Run the prompts twice with guesses; rejected ones are taken back in all ranks."""
        engine, drafted = self.engine(model, prompts, args, speculate=4), 0
        for name in ("request", "again"):
            add_all(engine, prompts, args, name)
            drafted += sum(result.stats.num_drafted for result in steps_of(engine))
        outputs = answers(engine, prompts, args, name="once more")
        return outcome(engine, outputs).exercising(drafted, "nothing was guessed")

    def int8(self, model, prompts, args) -> Outcome:
        """Keep K and V in int8."""
        return self.rounded("int8", model, prompts, args)

    def int4(self, model, prompts, args) -> Outcome:
        """Keep K and V in int4."""
        return self.rounded("int4", model, prompts, args)

    def rounded(self, kv_dtype, model, prompts, args) -> Outcome:
        """Round K and V. The answers must be those of one process that rounds alike, each prompt alone."""
        rounding = {"kv_dtype": kv_dtype, "enable_prefix_caching": False, "backend": "reference", "kernel": "reference"}
        plain = build_engine(model, **options_for(prompts, args, **rounding))
        expected = [answers(plain, [ids], args)[0] for ids in prompts]
        done = self.batched(model, prompts, args, kv_dtype=kv_dtype)
        done.expected = expected
        return done

    def host(self, model, prompts, args) -> Outcome:
        """Run all prompts, drop the pools' caches, and run them again with the KV in host memory."""
        engine = self.engine(model, prompts, args, kv_host_bytes=LARGE, kv_always=True)
        answers(engine, prompts, args)
        engine.scheduler.manager.coordinator.clear()
        return restored(engine, answers(engine, prompts, args, name="again"))

    def disk(self, model, prompts, args) -> Outcome:
        """Let one process fill a directory, and all ranks read it: a record is the same for any number of ranks."""
        with temporary() as folder:
            options = {"kv_cache_dir": folder, "kv_host_bytes": LARGE, "kv_always": True}
            one = build_engine(model, **options_for(prompts, args, backend="reference", **options))
            answers(one, prompts, args)
            tiers_of(one).tiers.close()
            engine = self.engine(model, prompts, args, **options)
            done = restored(engine, answers(engine, prompts, args, name="again"))
            tiers_of(engine).tiers.close()
        return done


def tiers_of(engine: Engine) -> BlockStore:
    """Return the tiers behind the engine's pool."""
    connector = cache_of(engine.scheduler.manager).connector
    assert isinstance(connector, TierConnector)
    return connector.block_store


def restored(engine: Engine, outputs) -> Outcome:
    """Return the answers, and the number of tokens that came back from a tier."""
    done = outcome(engine, outputs)
    done.kv["restored_tokens"] = tiers_of(engine).restored_tokens
    return done.exercising(done.kv["restored_tokens"], "no token came back from a tier")


def outcome(engine: Engine, outputs) -> Outcome:
    """Return the answers, and any faults: lost blocks."""
    return Outcome(outputs, {}, lost_blocks(engine))


def options_for(prompts, args, chunk=512, **options) -> dict[str, Any]:
    """Return an engine's options, for a pool that holds all prompts and answers twice, and the null block."""
    limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, chunked_prefill_size=chunk)
    usual = {"num_blocks": 1 + 3 * sum(blocks_for(prompts, args)), "block_size": args.block_size}
    return usual | {"scheduler_config": limits} | options


@contextmanager
def paths():
    """Yield the first path and the others by name."""
    with ExitStack() as stack:
        shared = Paths(stack)
        yield (ALONE, shared.alone), {name: getattr(shared, name) for name in PATHS}


def arguments():
    from mini_engine.assembly.loading import load

    parser = make_parser(first_line(__doc__), block_size=8)
    parser.set_defaults(load_model=load, device="cpu")  # where the ranks run
    tp = {"type": whole_number(1), "default": 2, "metavar": "N"}
    parser.add_argument("--tp", **tp, help="processes of one model (default: 2)")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, reference, torch or packed layers")
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    with paths() as (first, others):
        return run_several(18, first, others, parser, with_prompts(argv, parser, [LONG, *COURSE_PROMPTS[-3:]]))


if __name__ == "__main__":
    sys.exit(main())

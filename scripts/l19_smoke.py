"""Lesson 19. Prompts computed by a prefill worker, in every way that lessons 5 to 18 run a model: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
`--model` also takes hybrids, windows and latents: pocket-hybrid, pocket-windows, pocket-latent.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

from scripts import first_line
from scripts.l18_smoke import LARGE, LONG
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, answers, lost_blocks, run_several
from scripts.smoke.steps import steps_of

from mini_engine.assembly.build import build_engine, open_engine
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.handover.either import EitherConnector
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.stage import State
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector

ALONE = "alone"
CHUNK, MAX_NUM_SEQS = 7, 4
ENOUGH = 16  # tokens for a worker to compute if tiers have the others
PATHS = ("batched", "chunked", "preempted", "cached", "cancelled", "part", "guesses", "host", "int8", "ranks")


class Paths:
    """State that the paths share: engines, each with a worker, since a process takes seconds to start.

    Each path has its own namespace, so that neither side's prefix cache has the prompts of another path.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.opened: dict[str, Engine] = {}

    def engine(self, name: str, prompts, args, **options) -> Engine:
        """Return the engine with this name. It is opened on first use and closed when the script ends."""
        if name not in self.opened:
            config = EngineConfig(prefill_workers=1, **options_for(prompts, args, **options))
            engine = self.opened[name] = open_engine(args.model, config, args.dtype, args.device)
            self.stack.callback(engine.runner.close)
            self.stack.callback(cache_of(engine.scheduler.manager).connector.shutdown)
        return self.opened[name]

    def plain(self, prompts, args) -> Engine:
        """Return the engine of the paths without special needs: chunks are shorter than a block."""
        return self.engine("plain", prompts, args, handover_min_tokens=0)

    def alone(self, model, prompts, args) -> Outcome:
        """Run the prompts one after another."""
        run = Run(self.plain(prompts, args), args, ALONE)
        done = run.outcome([run.answers([ids])[0] for ids in prompts])
        done.kv = {"layout": "block-tensor, handed over", "bytes": run.engine.runner.pool.bytes}
        return done

    def batched(self, model, prompts, args) -> Outcome:
        """Run all prompts together while others, computed here, are being answered."""
        run = Run(self.plain(prompts, args), args, "batched")
        beside = [run.add(ids[:CHUNK], args.max_new_tokens + len(ids)) for ids in prompts[:2]]
        while not all(request.output_ids for request in beside):
            run.engine.step()
        outputs = run.answers(prompts)
        done = run.outcome(outputs)
        return done.exercising(run.num_mixed, "no answer went on while a prompt was on its way")

    def chunked(self, model, prompts, args) -> Outcome | LeftOut:
        """Run all prompts together; their first blocks arrive while the rest is being computed."""
        if all(len(ids) <= 2 * args.block_size for ids in prompts):
            return "no prompt has two blocks to hand over"
        run = Run(self.plain(prompts, args), args, "chunked")
        return run.outcome(run.answers(prompts)).exercising(run.num_partial, "no prompt arrived in parts")

    def preempted(self, model, prompts, args) -> Outcome:
        """Take back the blocks of the newest request every few steps."""
        run = Run(self.plain(prompts, args), args, "preempted")
        before = run.engine.scheduler.num_preemptions
        done = run.outcome(run.answers(prompts, preempt=True))
        return done.exercising(run.engine.scheduler.num_preemptions > before, "no request was preempted")

    def cached(self, model, prompts, args) -> Outcome:
        """Run the prompts again when both sides have cached them, and once more when only the worker has."""
        run = Run(self.plain(prompts, args), args, "cached")
        run.answers(prompts)
        manager, brought = run.engine.scheduler.manager, run.event("tokens")
        before = cache_of(manager).prefixes.stats.found_tokens
        again = run.answers(prompts)
        found = cache_of(manager).prefixes.stats.found_tokens - before - (run.event("tokens") - brought)
        brought = run.event("tokens")
        manager.coordinator.clear()
        done = run.outcome(run.answers(prompts))
        done.faults += ["the second answers differ from the third"] if again != done.outputs else []
        done.exercising(found > 0, "no prompt found a prefix here")
        return done.exercising(run.event("tokens") > brought, "the worker's cache was not asked")

    def cancelled(self, model, prompts, args) -> Outcome:
        """Abort every request while its prompt is in transit, and ask again at once."""
        run = Run(self.plain(prompts, args), args, "cancelled")
        before = run.event("cancelled")
        for ids in prompts:
            request = run.add(ids)
            run.engine.step()
            run.engine.abort(request.id)
        done = run.outcome(run.answers(prompts))
        return done.exercising(run.event("cancelled") > before, "every prompt arrived before it was cancelled")

    def part(self, model, prompts, args) -> Outcome:
        """Give the worker too few buffers for a prompt: the rest is computed here."""
        run = Run(self.small(prompts, args), args, "part")
        done = run.outcome(run.answers(prompts))
        whole = sum((len(ids) - 1) // args.block_size * args.block_size for ids in prompts)
        return done.exercising(run.num_brought < whole, "the buffers were enough for every prompt")

    def guesses(self, model, prompts, args) -> Outcome:
        """Run the prompts twice with guesses after the handed-over tokens."""
        run = Run(self.small(prompts, args), args, "guesses")
        run.answers(prompts)
        done = run.outcome(run.answers(prompts))
        return done.exercising(run.num_drafted, "nothing was guessed")

    def host(self, model, prompts, args) -> Outcome:
        """Run all prompts, drop the pool's cache, and run them again with the KV in host memory."""
        run = Run(self.small(prompts, args), args, "host")
        connector = cache_of(run.engine.scheduler.manager).connector
        assert isinstance(connector, EitherConnector) and isinstance(connector.tiers, TierConnector)
        store = connector.tiers.block_store
        run.answers(prompts)
        run.engine.scheduler.manager.coordinator.clear()
        brought, restored = run.event("tokens"), store.restored_tokens
        done = run.outcome(run.answers(prompts))
        done.kv["restored_tokens"] = store.restored_tokens - restored
        done.faults += ["a worker computed what host memory has"] if run.event("tokens") > brought else []
        return done.exercising(done.kv["restored_tokens"], "no token came back from host memory")

    def small(self, prompts, args) -> Engine:
        """Return an engine with a tier and guesses, and buffers for two blocks and their extras."""
        receiving = Run(self.plain(prompts, args), args, "").receiving
        num_buffers = 2 + receiving.extras.num_buffers(0, 2)
        options = {"handover_bytes": num_buffers * receiving.stage.buffer_bytes, "handover_min_tokens": ENOUGH}
        return self.engine("small", prompts, args, speculate=4, kv_host_bytes=LARGE, kv_always=True, **options)

    def int8(self, model, prompts, args) -> Outcome:
        """Keep K and V in int8. The answers must be those of one process that rounds alike, each prompt alone."""
        rounding = {"kv_dtype": "int8", "backend": "reference", "kernel": "reference"}
        plain = build_engine(model, **options_for(prompts, args, enable_prefix_caching=False, **rounding))
        expected = [answers(plain, [ids], args)[0] for ids in prompts]
        run = Run(self.engine("int8", prompts, args, handover_min_tokens=0, **rounding), args, "int8")
        done = run.outcome(run.answers(prompts))
        done.expected = expected
        return done

    def ranks(self, model, prompts, args) -> Outcome | LeftOut:
        """Hand a prompt over to two ranks, each of which takes its share of the heads."""
        if args.device != "cpu":
            return "ranks run on CPUs here"
        ranks = {"tensor_parallel_size": 2, "handover_min_tokens": 0}
        run = Run(self.engine("ranks", prompts, args, **ranks), args, "ranks")
        return run.outcome(run.answers(prompts))


class Run:
    """One path's requests to an engine, and figures of their transfers.

    Attributes:
        num_mixed: steps that ran while a prompt was in transit. num_partial: steps with one that had partly arrived.
        num_drafted: tokens that were guessed.
    """

    def __init__(self, engine: Engine, args, name: str) -> None:
        self.engine, self.args, self.name = engine, args, name
        connector = cache_of(engine.scheduler.manager).connector
        receiving = connector.workers if isinstance(connector, EitherConnector) else connector
        assert isinstance(receiving, ReceivingConnector)
        self.receiving = receiving
        self.num_requests = self.num_mixed = self.num_partial = self.num_drafted = 0
        self.before = {name: self.event(name) for name in ("transfers", "tokens", "losses")}

    def event(self, name: str) -> int:
        """Return the count of an event, over all paths of this engine."""
        return self.receiving.stats[0].events[name]

    @property
    def num_brought(self) -> int:
        """The number of tokens handed over in this path."""
        return self.event("tokens") - self.before["tokens"]

    def add(self, ids: list[int], max_tokens: int | None = None) -> Request:
        """Add a request."""
        self.num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens or self.args.max_new_tokens)
        return self.engine.add_request(f"{self.name} {self.num_requests}", ids, params, namespace=self.name)

    def answers(self, prompts: list[list[int]], preempt: bool = False) -> list[list[int]]:
        """Run until every prompt and all earlier requests are answered. preempt: as in `steps_of`."""
        requests = [self.add(ids) for ids in prompts]
        for result in steps_of(self.engine, preempt):
            self.num_drafted += result.stats.num_drafted
            asked = [transfer for transfer in self.receiving.asked.values() if transfer and transfer.is_open]
            self.num_mixed += bool(asked) and result.stats.decode_tokens > 0
            self.num_partial += any(transfer.num_filled for transfer in asked)
        if errors := [request.error for request in requests if request.error]:
            raise RuntimeError(errors[0])
        return [request.output_ids for request in requests]

    def outcome(self, outputs: list[list[int]]) -> Outcome:
        """Return the answers, and any faults: lost blocks or buffers, or a lost worker."""
        done = Outcome(outputs, {}, lost_blocks(self.engine))
        while self.receiving.transfers.any_lent:
            self.receiving.transfers.wait(1)
        states = self.receiving.transfers.buffers.states
        if num_kept := len(states) - states.count(State.FREE):
            done.faults.append(f"{num_kept} buffers are not free")
        if self.event("losses") > self.before["losses"]:
            done.faults.append("a prefill worker was lost")
        return done.exercising(self.event("transfers") > self.before["transfers"], "nothing was handed over")


def options_for(prompts, args, **options) -> dict:
    """Return an engine's options, for a pool that holds all prompts and answers twice, and the null block."""
    limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, chunked_prefill_size=CHUNK)
    usual = {"num_blocks": 1 + 3 * sum(blocks_for(prompts, args)), "block_size": args.block_size}
    return usual | {"scheduler_config": limits} | options


@contextmanager
def paths():
    """Yield the first path and the others by name."""
    with ExitStack() as stack:
        shared = Paths(stack)
        others: dict[str, Callable] = {name: getattr(shared, name) for name in PATHS}
        yield (ALONE, shared.alone), others


def arguments():
    from mini_engine.assembly.loading import load

    parser = make_parser(first_line(__doc__), block_size=8)
    parser.set_defaults(load_model=load)
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    with paths() as (first, others):
        return run_several(19, first, others, parser, with_prompts(argv, parser, [LONG, *COURSE_PROMPTS[-3:]]))


if __name__ == "__main__":
    sys.exit(main())

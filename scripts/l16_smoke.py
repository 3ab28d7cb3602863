"""Lesson 16. Latents in every way that lessons 5 to 14 run a model, expanded and absorbed: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import functools
import sys
from collections.abc import Callable
from unittest.mock import patch

from scripts import first_line
from scripts.l12_smoke import after_restart, temporary
from scripts.smoke.arguments import blocks_for, make_parser, tokenizer_of, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, add_all, answers, lost_blocks, run_several
from scripts.smoke.steps import steps_of

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine.assembly.build import build_engine
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.latents import reading, store
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.store import BlockStore

ALONE = "alone"
MAX_NUM_SEQS = 4
CHUNK_SIZES = (1, 7, 16)
LARGE = 2**28  # bytes of a tier
LONG = "Once upon a time there was a brave bear named Bruno. " * 12 + "The capital of France is"


def alone(model, prompts, args) -> Outcome:
    """Run the prompts one after another, without prefix caching."""
    engine = make_engine(model, prompts, args, enable_prefix_caching=False)
    return outcome(engine, [answers(engine, [ids], args)[0] for ids in prompts])


def batched(model, prompts, args, **options) -> Outcome | LeftOut:
    """Run all prompts together with these engine options, unless they cannot work here."""
    try:
        engine = make_engine(model, prompts, args, **options)
    except UserError as why:
        return str(why)
    return outcome(engine, answers(engine, prompts, args))


def chunked(size, model, prompts, args) -> Outcome | LeftOut:
    """Run all prompts together, `size` tokens of a prompt a step."""
    if all(len(ids) <= size for ids in prompts):
        return "no prompt is longer"
    return batched(model, prompts, args, chunk=size)


def preempted(model, prompts, args) -> Outcome:
    """Run in a pool that is too small for all answers, and take back the newest request's blocks every few steps."""
    engine = make_engine(model, prompts, args, CHUNK_SIZES[1], num_blocks=2 + max(blocks_for(prompts, args)))
    outputs = answers(engine, prompts, args, preempt=True)
    return outcome(engine, outputs).exercising(engine.scheduler.num_preemptions, "no request was preempted")


def cached(model, prompts, args) -> Outcome:
    """Run the prompts twice: the second time every whole block of a prompt is there."""
    engine = make_engine(model, prompts, args)
    answers(engine, prompts, args)
    found = cache_of(engine.scheduler.manager).prefixes.stats
    before = found.found_tokens
    outputs = answers(engine, prompts, args, name="again")
    return outcome(engine, outputs).exercising(found.found_tokens > before, "no prompt found a prefix")


def speculating(model, prompts, args) -> Outcome:
    """Run the prompts twice with guesses; rejected ones are taken back, with their latents."""
    engine, rejected = make_engine(model, prompts, args, speculate=4), 0
    for name in ("request", "again"):
        add_all(engine, prompts, args, name)
        for result in steps_of(engine):
            rejected += result.stats.num_drafted - result.stats.num_accepted
    outputs = answers(engine, prompts, args, name="once more")
    return outcome(engine, outputs).exercising(rejected, "no guess was taken back")


def from_host(model, prompts, args) -> Outcome:
    """Run all prompts, drop the pool's cache, and run them again."""
    engine = make_engine(model, prompts, args, kv_host_bytes=LARGE, kv_always=True)
    answers(engine, prompts, args)
    engine.scheduler.manager.coordinator.clear()
    return restored(engine, answers(engine, prompts, args, name="again"))


def from_disk(model, prompts, args) -> Outcome:
    """Run all prompts, then again in a new engine that has only the directory in common with the first."""
    with temporary() as folder:
        options = {"kv_cache_dir": folder, "kv_host_bytes": LARGE, "kv_always": True}
        first = make_engine(model, prompts, args, **options)
        answers(first, prompts, args)
        tiers_of(first).tiers.close()
        second = make_engine(model, prompts, args, **options)
        done = restored(second, answers(second, prompts, args))
        tiers_of(second).tiers.close()
    return done


def restarted(model, prompts, args) -> Outcome | LeftOut:
    """Ask a server, end its process, start another on the same directory and ask again."""
    if tokenizer_of(args) is None:
        return "the checkpoint has no tokenizer, which a server needs"
    return after_restart(model, prompts, args)


def padded(model, prompts, args) -> Outcome:
    """Run decode steps as lesson 10 captures them."""
    engine = make_engine(model, prompts, args, capture=no_graph)
    return outcome(engine, answers(engine, prompts, args))


def on_device(model, prompts, args) -> Outcome:
    """Run without an engine, in lesson 10's loop."""
    page, config = args.block_size, model.config
    pages = blocks_for(prompts, args)
    size = sum(pages) * page
    kernel = load_kernel("torch", args.device, model.dtype, latents=True)
    blocks = KvPool(config, 1 + sum(pages), page, kernel, model.dtype, args.device)
    table = ReqToTokenPool(len(prompts), max(pages) * page, args.device)
    allocator = TokenToKVPoolAllocator(size, page, device=args.device)
    storage = DeviceKv(table, allocator, SlotPool(blocks), store.LatentKv(config, blocks))
    return Outcome(generate_on_device(model, storage, prompts, args.max_new_tokens, config.eos_token_ids), {})


def only(decide: Callable[..., bool], model, prompts, args) -> Outcome:
    """Run in small chunks together with decodes, and read all latents outside decode steps in one way."""
    with patch.object(store, "expanding_pays", decide), patch.object(reading, "PIECE", 4 * args.block_size):
        engine = make_engine(model, prompts, args, CHUNK_SIZES[-1])
        return outcome(engine, answers(engine, prompts, args))


PATHS = {
    "batched": batched,
    **{f"chunks of {size}": functools.partial(chunked, size) for size in CHUNK_SIZES},
    "preempted": preempted,
    "cached prefix": cached,
    "speculation": speculating,
    "host": from_host,
    "packed layers": functools.partial(batched, backend="packed"),
    "kernel blockwise": functools.partial(batched, kernel="blockwise"),
    "expanded": functools.partial(only, lambda config, q_len, kv_len: True),
    "absorbed": functools.partial(only, lambda config, q_len, kv_len: False),
}
MORE_PATHS = {  # slow to start, or similar to one above
    "disk": from_disk,
    "restart": restarted,
    "torch layers": functools.partial(batched, backend="torch"),
    "padded": padded,
    "on device": on_device,
    **{f"kernel {name}": functools.partial(batched, kernel=name) for name in ("reference", "torch", "cpu")},
}


def options_for(prompts, args, chunk=512, **options) -> dict:
    """Return an engine's options, for a pool that holds all prompts and answers twice."""
    limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, chunked_prefill_size=chunk)
    usual = {"num_blocks": 1 + 2 * sum(blocks_for(prompts, args)), "backend": "reference", "kernel": args.kernel}
    return usual | {"block_size": args.block_size, "scheduler_config": limits} | options


def make_engine(model, prompts, args, chunk=512, **options) -> Engine:
    """Return an engine with these options, and the others as in `options_for`."""
    return build_engine(model, **options_for(prompts, args, chunk, **options))


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
    """Return the answers, the memory, and any faults: lost blocks."""
    kv = {"layout": "block-tensor, latents", "bytes": engine.runner.pool.bytes}
    return Outcome(outputs, kv, lost_blocks(engine))


def arguments():
    from mini_engine.families.deepseek import FAMILY

    parser = make_parser(first_line(__doc__), block_size=8, kernel=True)
    parser.set_defaults(load_model=FAMILY.load, default_model="pocket-latent")
    parser.add_argument("--all", action="store_true", help="also run from disk and with every kernel")
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    argv = with_prompts(argv, parser, [LONG, *COURSE_PROMPTS[1::5]])
    paths = PATHS | MORE_PATHS if parser.parse_args(argv).all else PATHS
    return run_several(16, (ALONE, alone), paths, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

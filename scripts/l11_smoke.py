"""Lesson 11. A hybrid alone, batched, in chunks, preempted, after a cached prefix, on the device: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import functools
import sys

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, answers, run_several

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from lessons.l11_hybrid.row_states import RowStates
from mini_engine.assembly.build import build_engine
from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import cache_of

ALONE = "alone"
MAX_NUM_SEQS = 4
CHUNK_SIZES = (1, 7, 33, 64)


def alone(model, prompts, args) -> Outcome:
    """Run the prompts one after another."""
    engine = make_engine(model, prompts, args, enable_prefix_caching=False)
    outputs = [answers(engine, [ids], args)[0] for ids in prompts]
    return outcome(engine, outputs)


def batched(model, prompts, args) -> Outcome:
    """Run all prompts together."""
    engine = make_engine(model, prompts, args)
    return outcome(engine, answers(engine, prompts, args))


def chunked(size, model, prompts, args) -> Outcome | LeftOut:
    """Run all prompts together, `size` tokens of a prompt a step."""
    if all(len(ids) <= size for ids in prompts):
        return "no prompt is longer"
    engine = make_engine(model, prompts, args, size)
    return outcome(engine, answers(engine, prompts, args))


def preempted(model, prompts, args) -> Outcome:
    """Take back blocks and state of the newest request every few steps."""
    engine = make_engine(model, prompts, args, CHUNK_SIZES[1])
    outputs = answers(engine, prompts, args, preempt=True)
    return outcome(engine, outputs).exercising(engine.scheduler.num_preemptions, "no request was preempted")


def cached(model, prompts, args) -> Outcome:
    """Run the prompts twice: the second time every prompt longer than a block begins with a checkpoint's state."""
    engine = make_engine(model, prompts, args)
    answers(engine, prompts, args)
    found = cache_of(engine.scheduler.manager).prefixes.stats
    before = found.found_tokens
    outputs = answers(engine, prompts, args, name="again")
    return outcome(engine, outputs).exercising(found.found_tokens > before, "no prompt found a checkpoint")


def on_device(model, prompts, args) -> Outcome:
    """Run without an engine, in lesson 10's loop: slots, tables, states and tokens stay on the device."""
    page, config, dtype, device = args.block_size, model.config, model.dtype, args.device
    pages = blocks_for(prompts, args)
    size = sum(pages) * page
    table = ReqToTokenPool(len(prompts), max(pages) * page, device)
    allocator = TokenToKVPoolAllocator(size, page, device=device)
    kernel = load_kernel("auto", device, dtype)
    blocks = KvPool(kv_shape(config), 1 + sum(pages), page, kernel, dtype, device)
    states = GdnPool.for_model(config, len(prompts), dtype=dtype, device=device)
    store = HybridKv(blocks, states)
    storage = DeviceKv(table, allocator, SlotPool(blocks), store, RowStates(states))
    outputs = generate_on_device(model, storage, prompts, args.max_new_tokens, config.eos_token_ids)
    held = allocator.size - allocator.available_size()
    return Outcome(outputs, {}, [f"{held} slots are still held"] if held else [])


PATHS = {
    "batched": batched,
    **{f"chunks of {size}": functools.partial(chunked, size) for size in CHUNK_SIZES},
    "preempted": preempted,
    "cached prefix": cached,
    "on device": on_device,
}


def make_engine(model, prompts, args, chunk=512, **options) -> Engine:
    """Return an engine whose pools hold all prompts and answers, and checkpoints at every block."""
    limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, chunked_prefill_size=chunk)
    return build_engine(
        model,
        backend="reference",
        num_blocks=1 + 2 * sum(blocks_for(prompts, args)),
        block_size=args.block_size,
        scheduler_config=limits,
        max_track_slots=4 * len(prompts) + 4,
        checkpoint_interval=8 * args.block_size,
        **options,
    )


def outcome(engine: Engine, outputs) -> Outcome:
    """Return the answers, the memory, and any faults: lost slots or checkpoints."""
    manager, pool = engine.scheduler.manager, engine.runner.pool
    memory = cache_of(engine.scheduler.manager).memory
    assert isinstance(pool, HybridKv) and isinstance(memory, StateMemory)  # a hybrid's own types
    states = memory.states
    lost = [f"{manager.blocks_by_state.held} blocks are still held"] if manager.blocks_by_state.held else []
    if len(memory.free_slots) != states.max_reqs:
        lost.append(f"{states.max_reqs - len(memory.free_slots)} state slots are still held")
    if len(memory.checkpoints.slots) + len(states.free_track_slots) != states.max_track_slots:
        lost.append("a checkpoint slot belongs to no node")
    kv = {"layout": "block-tensor, states", "bytes": pool.bytes, "state_bytes": pool.states.mem_bytes}
    return Outcome(outputs, kv, lost)


def arguments():
    from mini_engine.families.qwen3_5 import FAMILY

    parser = make_parser(first_line(__doc__), block_size=8)
    parser.set_defaults(load_model=FAMILY.load, default_model="pocket-hybrid")
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    return run_several(11, (ALONE, alone), PATHS, parser, with_prompts(argv, parser, COURSE_PROMPTS[::4]))


if __name__ == "__main__":
    sys.exit(main())

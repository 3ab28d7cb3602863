"""Lesson 10. The path that smoke scripts share from lesson 10 on: no engine, its loop on the device."""

from collections.abc import Callable
from typing import Any

from scripts.smoke.arguments import blocks_for
from scripts.smoke.run import Outcome
from scripts.smoke.trial import Trial

from lessons.l10_device.loop import DeviceKv, RowMemory, generate_on_device
from lessons.l10_device.pools import make_full_attention_net_mem_pool, make_req_to_token_pool
from mini_engine.gpu.graphs import Capture, no_graph
from mini_engine.kv.block_tensor import KvPool, PoolShape

NO_MEMORY = RowMemory()


def on_device(
    trial: Trial,
    shape: PoolShape,
    kernel: Callable[..., Any],
    store: Callable[[KvPool], Any] | None = None,
    memory: RowMemory = NO_MEMORY,
    capture: Capture = no_graph,
) -> Outcome:
    """Run all prompts: slots, tables and tokens stay on the device until all answers are complete.

    Args:
        shape: of the pool. store: what the model reads and writes, over the pool. memory: what a row has besides.
    """
    model, args, page = trial.model, trial.args, trial.args.block_size
    device, pages = args.device, blocks_for(trial.prompts, args)
    table = make_req_to_token_pool(len(pages), max(pages) * page, page_size=page, device=device)
    sizes = {"page_size": page, "kernel": kernel, "dtype": model.dtype, "device": device}
    shapes = shape.num_hidden_layers, *shape.k_shape, *shape.v_shape
    pool, allocator = make_full_attention_net_mem_pool(sum(pages) * page, *shapes, **sizes)
    kv = DeviceKv(table, allocator, pool, store and store(pool.blocks), memory)
    stops = model.config.eos_token_ids
    outputs = generate_on_device(model, kv, trial.prompts, args.max_new_tokens, stops, capture)
    held = allocator.size - allocator.available_size()
    return Outcome(outputs, {}, [f"{held} slots are still held"] if held else [])

"""Lesson 10. The engine, the engine with replayed decode steps, and the device loop: the tokens are the same.

No path is left out: on a CPU the padded steps run without a graph, on a GPU they are captured, and a path that cannot
run is an error.
"""

import sys

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import drained, run_several

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.pools import make_full_attention_net_mem_pool, make_req_to_token_pool
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import Capture, CudaCapture, GraphRunner, no_graph

PLAIN = "plain"
MAX_NUM_SEQS = 8


def generate(model, prompts, args) -> Outcome:
    """Run all prompts through lesson 5's engine."""
    return drained(make_engine(model, prompts, args), prompts, args)


def replayed(model, prompts, args) -> Outcome:
    """Run the same engine with decode steps that are padded to a capture size and replayed."""
    engine = make_engine(model, prompts, args)
    runner = GraphRunner(ModelRunner(model, engine.runner.pool), MAX_NUM_SEQS, capture_for(args.device))
    return drained(Engine(engine.config, engine.scheduler, runner), prompts, args)


def on_device(model, prompts, args) -> Outcome:
    """Run without an engine: slots, tables and tokens stay on the device until all answers are complete."""
    page, dtype, device = args.block_size, model.dtype, args.device
    config, kernel = model.config, load_kernel(kernel_for(device), device, dtype)
    longest = max(map(len, prompts)) + args.max_new_tokens
    table = make_req_to_token_pool(len(prompts), longest, page_size=page, device=device)
    size, shapes = sum(blocks_for(prompts, args)) * page, (*config.k_shape, *config.v_shape)
    pool, allocator = make_full_attention_net_mem_pool(
        size, config.num_hidden_layers, *shapes, page_size=page, kernel=kernel, dtype=dtype, device=device
    )
    kv, stops = DeviceKv(table, allocator, pool), config.eos_token_ids
    outputs = generate_on_device(model, kv, prompts, args.max_new_tokens, stops, capture_for(device))
    held = allocator.size - allocator.available_size()
    return Outcome(outputs, {}, [f"{held} slots are still held"] if held else [])


PATHS = {"replayed": replayed, "on device": on_device}


def make_engine(model, prompts, args) -> Engine:
    """Return an engine whose pool holds all prompts and answers at once."""
    return Engine.for_model(
        model,
        num_blocks=1 + sum(blocks_for(prompts, args)),
        block_size=args.block_size,
        kernel=kernel_for(args.device),
        scheduler_config=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
    )


def kernel_for(device: str) -> str:
    """Return the kernel that can be captured on a GPU, and the fastest that works elsewhere."""
    return "triton" if device == "cuda" else "auto"


def capture_for(device: str) -> Capture:
    """Return the capture for a device: CUDA graphs on a GPU, no recording elsewhere."""
    return CudaCapture() if device == "cuda" else no_graph


def arguments():
    return make_parser(first_line(__doc__), block_size=16)


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    return run_several(10, (PLAIN, generate), PATHS, parser, with_prompts(argv, parser, COURSE_PROMPTS[::3]))


if __name__ == "__main__":
    sys.exit(main())

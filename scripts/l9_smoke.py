"""Lesson 9. One model run in several ways, with fast layers and with replayed steps: the tokens are the same in all."""

import copy
import sys
from collections.abc import Callable

from smoke_common import Outcome, make_parser, run_smoke, whole_number, with_prompts

from mini_engine.errors import UserError

MAX_NUM_SEQS = 8
Answers = list[list[int]]


def in_engine(model, prompts, args, graphs: bool = False) -> Answers:
    """Lesson 5's engine; with `graphs`, its decode steps are padded to a rung of the ladder and replayed."""
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import SchedulerConfig
    from mini_engine.gpu.graphs import GraphRunner

    engine = Engine.for_model(
        model,
        num_blocks=1 + sum(-(-(len(ids) + args.max_new_tokens) // args.block_size) for ids in prompts),
        block_size=args.block_size,
        kernel=kernel_for(args.device),
        scheduler_config=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
    )
    if graphs:
        engine.runner = GraphRunner(model, engine.runner.pool, MAX_NUM_SEQS, capture_for(args.device))
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    requests = [engine.add_request(str(index), ids, params) for index, ids in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    return [request.output_ids for request in requests]


def replayed(model, prompts, args) -> Answers:
    """The engine with captured decode steps; on a CPU the very same padded steps, without the capture."""
    return in_engine(model, prompts, args, graphs=True)


def on_device(model, prompts, args) -> Answers:
    """No engine: slots, tables and tokens stay on the device until all answers are done."""
    from mini_engine.attention.registry import load_kernel
    from mini_engine.gpu.kv_pool import KvPool
    from mini_engine.gpu.loop import DeviceKv, generate_on_device
    from mini_engine.gpu.req_to_token import ReqToTokenPool
    from mini_engine.gpu.slot_allocator import TokenToKVPoolAllocator

    page, dtype, device = args.block_size, model.dtype, args.device
    pages = [-(-(len(ids) + args.max_new_tokens) // page) for ids in prompts]
    kernel = load_kernel(kernel_for(device), device, dtype)
    kv = DeviceKv(
        ReqToTokenPool(len(prompts), max(pages) * page, device),
        TokenToKVPoolAllocator(sum(pages) * page, page_size=page, device=device),
        KvPool.for_model(model.config, sum(pages) * page, page_size=page, kernel=kernel, dtype=dtype, device=device),
    )
    return generate_on_device(model, kv, prompts, args.max_new_tokens, model.config.eos_token_ids, capture_for(device))


def sped_up(backend: str) -> Callable[..., Answers]:
    """The engine over a copy of the model with fast layers."""

    def run(model, prompts, args) -> Answers:
        from mini_engine.cpu import speed_up

        return in_engine(speed_up(copy.deepcopy(model), backend), prompts, args)

    return run


BACKENDS = {
    "as it was": in_engine,
    "replayed": replayed,
    "on device": on_device,
    "fast, torch": sped_up("torch"),
    "fast, packed": sped_up("packed"),
}


def kernel_for(device: str) -> str:
    """On a GPU the kernel that can be captured, elsewhere the best there is."""
    return "triton" if device == "cuda" else "auto"


def capture_for(device: str):
    """What records steps: CUDA graphs, or nothing."""
    from mini_engine.gpu.graphs import CudaCapture, no_graph

    return CudaCapture() if device == "cuda" else no_graph


def generate(model, prompts, args) -> Outcome:
    """All prompts in each way. Hugging Face is asked about the last; the others must equal it."""
    answers, left_out = {}, {}
    for name, run in BACKENDS.items():
        try:
            answers[name] = run(model, prompts, args)
        except UserError as why:  # no compiler for the packed weights, or a GPU where they are for the CPU
            left_out[name] = str(why)
    last, faults = answers[list(answers)[-1]], []
    for name, found in answers.items():
        unequal = [index for index, pair in enumerate(zip(found, last, strict=True)) if pair[0] != pair[1]]
        if unequal and args.dtype == "float32":
            faults.append(f"{name}: answers {unequal} are not those of {list(answers)[-1]!r}")
    return Outcome(last, {"backends": list(answers), "left_out": left_out}, faults)


def arguments():
    parser = make_parser(__doc__)
    parser.add_argument("--block-size", type=whole_number(1), default=16, metavar="N", help="default: 16")
    return parser


def main(argv=None) -> int:
    from mini_engine.pocket import COURSE_PROMPTS

    parser = arguments()
    return run_smoke(9, generate, parser, with_prompts(argv, parser, COURSE_PROMPTS[::3]))


if __name__ == "__main__":
    sys.exit(main())

"""Lesson 4. The sampler: greedy answers equal Hugging Face's, drawn ones are the same alone and in a batch.

Each prompt is answered twice: greedily, and drawn in a batch with greedy neighbours. The drawn answer is compared with
the same prompt run alone, its tokens drawn from the distributions of transformers' own processors.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict

from scripts import first_line
from scripts.smoke.arguments import load_ours, make_parser, tokenizer_of
from scripts.smoke.report import print_json, show
from scripts.smoke.run import Outcome, compare

import torch

from lessons.l4_sampler.row import Row
from mini_engine.attention.registry import load_kernel
from mini_engine.cli.parser import guard, whole_number
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import draw_tokens, process, sample
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all

BLOCK_SIZE = 16


@torch.inference_mode()
def run(model, jobs, args, sampler=sample) -> Outcome:
    """Answer all (prompt, params) of `jobs` in packed steps, as in lesson 3. Each ends according to its params."""
    blocks = sum(-(-(len(prompt) + params.max_tokens) // BLOCK_SIZE) for prompt, params in jobs) + 1
    dtype, eos = model.dtype, model.config.eos_token_ids
    pool = KvPool(model.config, blocks, BLOCK_SIZE, load_kernel("auto", args.device, dtype), dtype, args.device)
    allocator = BlockAllocator(blocks, BLOCK_SIZE)
    pairs = []
    for prompt, params in jobs:
        request = PackedRequest(list(prompt), BlockTable(allocator))
        pairs.append((request, Row(params, request.prompt_ids, request.output_ids, params.stop_ids(eos))))
    running = list(pairs)
    while running:
        logits = forward(model, pool, [request for request, _ in running])
        for (request, row), chosen in zip(running, sampler(logits, [row for _, row in running]), strict=True):
            request.output_ids.append(chosen.token_id)
            if row.params.finish_reason(row.output_ids, row.stop_ids):
                request.table.free()
        running = [(request, row) for request, row in running if request.table.blocks]
    kv = {"layout": "block-tensor", "bytes": pool.bytes, "blocks": blocks - 1, "block_size": BLOCK_SIZE}
    return Outcome([request.output_ids for request, _ in pairs], kv | {"free_at_end": allocator.num_free})


def forward(model, pool, requests):
    """Run one packed pass, writing all missing KV. Returns the logits `[R, vocab]` of each request's next token."""
    reserve_all(requests)
    meta = plan_packed(requests, BLOCK_SIZE, pool.device)
    fed = [token for request in requests for token in request.token_ids[request.cur_len :]]
    for request in requests:
        request.cur_len = len(request.token_ids)
    return model(torch.tensor(fed, device=pool.device), pool, meta, rows=meta.cu_seqlens_q[1:].long() - 1)


def greedy(args) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=args.max_new_tokens)


def drawing(args, index) -> SamplingParams:
    """Return the parameters that the options ask for. Each prompt gets its own seed."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {name: getattr(args, name) for name in names}
    return SamplingParams(**asked, seed=args.seed + index, max_tokens=args.max_new_tokens)


def generate(model, prompts, args) -> Outcome:
    """Answer every prompt greedily, all in one batch."""
    return run(model, [(prompt, greedy(args)) for prompt in prompts], args)


class FromTransformers:
    """Chooses for one request from transformers' distributions. `unequal`: the steps in which ours differ."""

    def __init__(self) -> None:
        self.unequal = []

    def __call__(self, logits, rows):
        row, logits = rows[0], logits.float()
        context = torch.tensor([[*row.prompt_ids, *row.output_ids]], device=logits.device)
        theirs, ours = processors(row.params)(context, logits), process(logits.clone(), rows)
        if not (torch.equal(ours.isinf(), theirs.isinf()) and torch.allclose(ours, theirs, rtol=1e-5)):
            self.unequal.append(len(row.output_ids))
        token = theirs.argmax(dim=-1) if row.params.is_greedy else draw_tokens(theirs, rows)
        return [Sampled(int(token), None)]


def processors(params) -> Callable[..., torch.Tensor]:
    """Return transformers' own processors, in the order of its `generate`."""
    from transformers.generation import logits_process as hf

    chain = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.is_greedy:
        chain.append(hf.TemperatureLogitsWarper(params.temperature))
        chain += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        chain += [hf.MinPLogitsWarper(params.min_p)]
    return chain


def compare_drawn(model, prompts, args) -> Outcome:
    """Draw every prompt in one batch with greedy neighbours, then alone from transformers' distributions."""
    jobs = [(prompt, drawing(args, index)) for index, prompt in enumerate(prompts)]
    neighbours = [(prompt, greedy(args)) for prompt in prompts]
    drawn = run(model, [job for pair in zip(neighbours, jobs, strict=True) for job in pair], args)
    drawn.outputs = drawn.outputs[1::2]
    for index, (job, beside) in enumerate(zip(jobs, drawn.outputs, strict=True)):
        reference = FromTransformers()
        alone = run(model, [job], args, reference).outputs[0]
        if reference.unequal:
            drawn.faults.append(
                f"prompt {index}: the distributions of new tokens {reference.unequal} differ from transformers'"
            )
        if beside != alone:
            drawn.faults.append(f"prompt {index}: drawn beside neighbours {beside}, drawn alone {alone}")
    return drawn


def smoke(args) -> int:
    """Run and report both comparisons. Returns 0 if everything is equal, else 1."""
    drawing(args, 0)  # reports an invalid option before anything runs
    report = compare(4, generate, args)
    drawn = compare_drawn(*load_ours(args), args)
    report.faults += drawn.faults
    report.match = report.match and not drawn.faults
    if args.json:
        print_json(asdict(report) | {"drawn": drawn.outputs})
        return 0 if report.match else 1
    tokenizer = tokenizer_of(args)
    show(report, tokenizer)
    same = "" if drawn.faults else ", the same alone and from transformers' distributions"
    print(f"Drawn at temperature {args.temperature:g} beside greedy neighbours{same}:")
    for index, ids in enumerate(drawn.outputs):
        print(f"[{index}] {tokenizer.decode(ids)!r}" if tokenizer else f"[{index}] {ids}")
    return 0 if report.match else 1


def arguments():
    parser = make_parser(first_line(__doc__))
    knobs = parser.add_argument_group("the drawn answers")
    knobs.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: 0.8; 0 is greedy")
    knobs.add_argument("--top-k", type=int, default=0, metavar="K", help="default: 0, off")
    knobs.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default: 0.95; 1 is off")
    knobs.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0, off")
    knobs.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="default: 1, off")
    knobs.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="prompt i has N + i (default: 0)")
    return parser


def main(argv=None) -> int:
    return guard(arguments(), smoke, argv)


if __name__ == "__main__":
    sys.exit(main())

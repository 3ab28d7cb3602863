"""Lesson 4. The sampler: greedy beside Hugging Face's generate, then the same draws alone and in a mixed batch."""

import sys
from dataclasses import asdict

import torch
from smoke_common import (
    Divergence,
    Outcome,
    RequestReport,
    _tokenizer_of,
    compare,
    guard,
    load_ours,
    make_parser,
    print_json,
    show,
    whole_number,
)
from transformers import generation

from mini_engine.attention.contract import load_kernel
from mini_engine.engine.sampler import Sampled, draw_tokens, process, sample
from mini_engine.engine.sampling_params import SampleRow, SamplingParams
from mini_engine.kv.block_tensor import BlockAllocator, BlockTable, KvPool, Request, plan_packed, reserve_all

BLOCK_SIZE = 16


@torch.inference_mode()
def run(model, jobs, args, sampler=sample):
    """Answer every (prompt, params) of `jobs` in packed steps, as lesson 3 does; each ends as its own params say."""
    blocks = sum(-(-(len(prompt) + params.max_tokens) // BLOCK_SIZE) for prompt, params in jobs) + 1
    dtype = model.head_weight.dtype
    pool = KvPool(model.config, blocks, BLOCK_SIZE, load_kernel("auto", args.device, dtype), dtype, args.device)
    allocator = BlockAllocator(blocks, BLOCK_SIZE)
    requests = [Request(list(prompt), BlockTable(allocator)) for prompt, _ in jobs]
    rows = [
        SampleRow(params, request.prompt_ids, request.output_ids, params.stop_ids(model.config.eos_token_ids))
        for (_, params), request in zip(jobs, requests, strict=True)
    ]
    running = list(zip(requests, rows, strict=True))
    while running:
        logits = forward(model, pool, [request for request, _ in running])
        for (request, row), chosen in zip(running, sampler(logits, [row for _, row in running]), strict=True):
            request.output_ids.append(chosen.token_id)
            if row.params.finish_reason(row.output_ids, row.stop_ids):
                request.table.free()
        running = [(request, row) for request, row in running if request.table.blocks]
    return [request.output_ids for request in requests], pool, allocator


def forward(model, pool, requests):
    """One packed pass: the logits `[R, vocab]` of each request's next token. Its missing KV is written."""
    reserve_all(requests)
    meta = plan_packed(requests, BLOCK_SIZE, pool.device)
    fed = [token for request in requests for token in request.token_ids[request.cur_len :]]
    for request in requests:
        request.cur_len = len(request.token_ids)
    return model(torch.tensor(fed, device=pool.device), pool, meta, rows=meta.cu_seqlens_q[1:].long() - 1)


def generate(model, prompts, args) -> Outcome:
    """Every prompt greedily, all in one batch: what Hugging Face's tokens are compared with."""
    greedy = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    outputs, pool, allocator = run(model, [(prompt, greedy) for prompt in prompts], args)
    kv = {"layout": "block-tensor", "bytes": pool.bytes, "blocks": pool.num_blocks - 1, "block_size": BLOCK_SIZE}
    return Outcome(outputs, kv | {"free_at_end": allocator.num_free})


class FromTransformers:
    """A sampler for one request: transformers' own processors, then our draw. It counts where ours give the same."""

    def __init__(self) -> None:
        self.gaps, self.equal = [], 0

    def __call__(self, logits, rows):
        row = rows[0]
        ids = torch.tensor([[*row.prompt_ids, *row.output_ids]], device=logits.device)
        theirs = transformers_processors(row.params)(ids, logits.float())
        self.equal += torch.equal(process(logits.float().clone(), rows), theirs)
        best = logits[0].float().topk(2).values
        self.gaps.append(float(best[0] - best[1]))
        token = theirs.argmax(dim=-1) if row.params.is_greedy else draw_tokens(theirs, rows)
        return [Sampled(int(token), None)]


def transformers_processors(params):
    """transformers' processors for these parameters, in the order of its `generate`."""
    processors = generation.LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(generation.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.is_greedy:
        return processors
    if params.temperature != 1:
        processors.append(generation.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(generation.MinPLogitsWarper(params.min_p))
    return processors


def compare_sampled(args):
    """Each prompt drawn beside greedy neighbours, and drawn alone from transformers' distributions.

    Returns:
        a report for each prompt (`ours` beside neighbours, `hf` alone), how many distributions there were, how many of
        them ours equal.
    """
    model, prompts = load_ours(args)
    greedy = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    jobs = [(prompt, sampled_params(args, index)) for index, prompt in enumerate(prompts)]
    neighbours = [(prompt[:-1] or prompt, greedy) for prompt in prompts]
    together, _, _ = run(model, [job for pair in zip(neighbours, jobs, strict=True) for job in pair], args)
    reports, drawn, equal = [], 0, 0
    for job, ours in zip(jobs, together[1::2], strict=True):
        reference = FromTransformers()
        (alone,), _, _ = run(model, [job], args, reference)
        divergence = None if ours == alone else first_divergence(ours, alone, reference.gaps)
        reports.append(RequestReport(job[0], ours, alone, ours == alone, divergence))
        drawn, equal = drawn + len(reference.gaps), equal + reference.equal
    return reports, drawn, equal


def first_divergence(ours, alone, gaps):
    at = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), min(len(ours), len(alone)))
    got, expected = (ids[at] if at < len(ids) else None for ids in (ours, alone))
    where = "a sampled request: beside neighbours it drew another token than alone from transformers' distribution"
    return Divergence(at, expected, got, gaps[min(at, len(gaps) - 1)], False, where)


def sampled_params(args, index) -> SamplingParams:
    """What the options ask for; each prompt has its own seed."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    seed = args.seed + index
    return SamplingParams(**{name: getattr(args, name) for name in names}, seed=seed, max_tokens=args.max_new_tokens)


def smoke(args) -> int:
    """Both comparisons and their report; 0 if all is equal, else 1."""
    sampled_params(args, 0)  # a wrong option is told before anything runs
    report = compare(4, generate, args)
    sampled, drawn, equal = compare_sampled(args)
    same = all(request.match for request in sampled) and equal == drawn
    if args.json:
        report.requests += sampled
        report.match = report.match and same
        print_json(asdict(report) | {"sampled": {"distributions": drawn, "equal": equal, "match": same}})
        return 0 if report.match else 1
    tokenizer = _tokenizer_of(args)
    show(report, tokenizer)
    print(f"Sampled: temperature {args.temperature:g}, top-p {args.top_p:g}, top-k {args.top_k}, seed {args.seed}")
    for index, request in enumerate(sampled):
        print(f"[{index}] {tokenizer.decode(request.ours) if tokenizer else request.ours!r}")
    print(f"{equal} of {drawn} distributions equal transformers'; {sum(r.match for r in sampled)} of {len(sampled)} ")
    return 0 if report.match and same else 1


def arguments():
    parser = make_parser(__doc__)
    drawing = parser.add_argument_group("the sampled part")
    drawing.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: 0.8; 0 is greedy")
    drawing.add_argument("--top-k", type=whole_number(0), default=0, metavar="K", help="default: 0, off")
    drawing.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default: 0.95; 1 is off")
    drawing.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0, off")
    drawing.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="default: 1, off")
    drawing.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of the first prompt (default: 0)")
    return parser


def main(argv=None) -> int:
    return guard(arguments(), smoke, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Lesson 8. Runs a chat, a shared system prompt, branches, and a pool that is too small; compares with cold runs."""

import argparse
import sys
import time
from dataclasses import asdict, dataclass

from scripts.smoke.arguments import blocks_for, load_ours, make_parser, tokenizer_of, with_prompts
from scripts.smoke.hugging_face import hf_generate, load_hf
from scripts.smoke.report import Report, RequestReport, print_json, show
from scripts.smoke.run import Outcome, find_divergence
from scripts.smoke.steps import run_out

from mini_engine.cli.parser import guard
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.cache_coordinator import cache_of, caching_manager

COMMON_BLOCKS = 5


@dataclass
class Scenario:
    """An engine with its pool, and all its requests in order. evicts: True if the pool is meant to be too small."""

    name: str
    engine: Engine
    args: argparse.Namespace
    requests: list
    evicts: bool = False

    def ask(self, prompts) -> list[list[int]]:
        """Run all prompts together; return their answers."""
        params = SamplingParams(temperature=0, max_tokens=self.args.max_new_tokens)
        first = len(self.requests)
        self.requests += [self.engine.add_request(str(first + i), ids, params) for i, ids in enumerate(prompts)]
        run_out(self.engine)
        return [request.output_ids for request in self.requests[first:]]

    def figures(self) -> dict:
        manager = self.engine.scheduler.manager
        prefixes, blocks = cache_of(manager).prefixes, manager.blocks_by_state
        stats = prefixes.stats
        return {
            "requests": len(self.requests),
            "prompt_tokens": stats.asked_tokens,
            "found_tokens": stats.found_tokens,
            "hit_rate": round(stats.hit_rate, 3),
            "evicted_blocks": prefixes.tree.num_evicted,
            "blocks": manager.num_usable_blocks,
            "held_at_end": blocks.held,
        }

    def faults(self) -> list[str]:
        held = self.engine.scheduler.manager.blocks_by_state.held
        errors = [f"{self.name}: request {r.id} ended with an error: {r.error}" for r in self.requests if r.error]
        return errors + ([f"{self.name}: {held} blocks are still held after all requests have ended"] if held else [])

    def not_exercised(self) -> list[str]:
        """Return the features that this scenario was meant to show but did not need."""
        figures = self.figures()
        kept = [] if figures["found_tokens"] else [f"{self.name}: no prompt found a prefix"]
        return kept + ([f"{self.name}: no block was evicted"] if self.evicts and not figures["evicted_blocks"] else [])


def begin(name, model, args, prompts, share=1.0) -> Scenario:
    """Return a scenario whose pool holds `share` of the need of all prompts and answers, but at least the largest."""
    needs = blocks_for(prompts, args)
    blocks = max(max(needs), int(sum(needs) * share)) + 1
    engine = Engine.for_model(
        model, num_blocks=blocks, block_size=args.block_size, kernel=args.kernel, manager=caching_manager
    )
    return Scenario(name, engine, args, [], evicts=share < 1)


def chat(model, prompts, args) -> Scenario:
    """Run a chat; each turn's prompt is the whole conversation so far."""
    longest = sum(map(len, prompts)) + len(prompts) * args.max_new_tokens
    scenario, history = begin("chat", model, args, [[0] * longest] * 2), []
    for ids in prompts:
        history = history + ids
        history = history + scenario.ask([history])[0]
    return scenario


def system_prompt(model, prompts, args) -> Scenario:
    """Run all prompts after one system prompt at once, then the first again: its prompt is cached by then."""
    asked = [common(prompts, args) + ids for ids in prompts]
    scenario = begin("shared system prompt", model, args, asked)
    scenario.ask(asked)
    scenario.ask(asked[:1])
    return scenario


def branches(model, prompts, args) -> Scenario:
    """Run prompts that diverge inside a block, then continue one answer in two ways."""
    trunk = common(prompts, args)[: 2 * args.block_size + args.block_size // 2]
    asked = [trunk + ids for ids in prompts]
    scenario = begin("branching", model, args, [*asked, *asked])
    first = asked[0] + scenario.ask(asked)[0]
    scenario.ask([first + ids for ids in prompts[:2]])
    return scenario


def too_small(model, prompts, args) -> Scenario:
    """Alternate between beginnings in a pool that cannot keep them all, so that every hit must survive evictions."""
    start = common(prompts, args)
    asked = [start[shift:] + start[:shift] + prompts[0] for shift in range(4)]
    scenario = begin("eviction", model, args, asked, share=0.6)
    for ids in asked + asked[::-1]:
        scenario.ask([ids])
    return scenario


def common(prompts, args) -> list[int]:
    """Return a common beginning of a few whole blocks, made from the prompts."""
    tokens = [token for ids in prompts for token in ids]
    length = COMMON_BLOCKS * args.block_size
    return (tokens * (length // len(tokens) + 1))[:length]


def generate(model, prompts, args) -> Outcome:
    """Run the prompts together as one scenario, for `explain_divergence.py`."""
    scenario = begin("prompts", model, args, prompts)
    return Outcome(scenario.ask(prompts), scenario.figures(), scenario.faults())


def compare(args) -> tuple[Report, dict]:
    """Run every scenario, and Hugging Face's cold run of each of its requests. Return the report and figures."""
    started = time.perf_counter()
    model, prompts = load_ours(args)
    ready = time.perf_counter()
    scenarios = [play(model, prompts, args) for play in (chat, system_prompt, branches, too_small)]
    done = time.perf_counter()
    hf_model = load_hf(args.hf_model or args.model, args)
    hf_ready = time.perf_counter()
    reports, cold = [], {}
    for request in (request for scenario in scenarios for request in scenario.requests):
        ids, ours = request.prompt_ids, request.output_ids
        if tuple(ids) not in cold:
            cold[tuple(ids)] = hf_generate(hf_model, ids, args.max_new_tokens, model.config.eos_token_ids)
        reports.append(RequestReport(ids, ours, cold[tuple(ids)], ours == cold[tuple(ids)]))
    seconds = {"load": ready - started, "ours": done - ready, "hf": time.perf_counter() - hf_ready}
    for report in reports:
        if not report.match:
            report.first_divergence = find_divergence(model, hf_model, generate, report, args)
    faults = [fault for scenario in scenarios for fault in scenario.faults()]
    match = all(report.match for report in reports) and not faults
    figures = {scenario.name: scenario.figures() for scenario in scenarios}
    asked, found = (sum(f[name] for f in figures.values()) for name in ("prompt_tokens", "found_tokens"))
    kv = {"layout": "block-tensor", "block_size": args.block_size, "prompt_tokens": asked, "found_tokens": found}
    unused = [line for scenario in scenarios for line in scenario.not_exercised()]
    return Report(8, args.model, args.dtype, args.device, match, reports, kv, seconds, faults, unused), figures


def smoke(args) -> int:
    """Compare and report. Return 0 if everything matches, otherwise 1."""
    report, figures = compare(args)
    if args.json:
        print_json(asdict(report) | {"scenarios": figures})
        return 0 if report.match else 1
    show(report, tokenizer_of(args))
    for name, f in figures.items():
        print(
            f"{name}: {f['requests']} requests, {f['found_tokens']} of {f['prompt_tokens']} prompt tokens found "
            f"({f['hit_rate']:.0%}), {f['evicted_blocks']} blocks evicted, pool of {f['blocks']}"
        )
    return 0 if report.match else 1


def arguments():
    return make_parser(__doc__, block_size=8, kernel=True)


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    return guard(parser, smoke, with_prompts(argv, parser, COURSE_PROMPTS[-3:]))


if __name__ == "__main__":
    sys.exit(main())

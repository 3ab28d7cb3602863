"""Lesson 4. The sampler: greedy answers equal Hugging Face's, drawn ones are the same alone and in a batch.

Each prompt is answered twice: greedily, and drawn in a batch with greedy neighbours. The drawn answer is compared with
the same prompt run alone, its tokens drawn from the distributions of transformers' own processors.
"""

import sys

from scripts.smoke.arguments import make_parser, tokenizer_of
from scripts.smoke.packed import FromTransformers, run_packed
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.cli.parser import whole_number
from mini_engine.engine.sampling_params import SamplingParams

KNOBS = {  # the drawn answers': option, default and help
    "temperature": (0.8, "T", "default: 0.8; 0 is greedy"),
    "top_k": (0, "K", "default: 0, off"),
    "top_p": (0.95, "P", "default: 0.95; 1 is off"),
    "min_p": (0.0, "P", "default: 0, off"),
    "repetition_penalty": (1.0, "X", "default: 1, off"),
}


def greedy_jobs(prompts, args) -> list:
    return [(prompt, SamplingParams(temperature=0, max_tokens=args.max_new_tokens)) for prompt in prompts]


def generate(model, prompts, args) -> Outcome:
    """Answer every prompt greedily, all in one batch."""
    return run_packed(model, greedy_jobs(prompts, args), args)


def generate_both(model, prompts, args) -> Outcome:
    """Answer greedily; then draw in one batch with greedy neighbours, and alone from transformers' distributions."""
    asked = {name: getattr(args, name) for name in KNOBS} | {"max_tokens": args.max_new_tokens}
    jobs = [(ids, SamplingParams(**asked, seed=args.seed + index)) for index, ids in enumerate(prompts)]
    done, neighbours = generate(model, prompts, args), greedy_jobs(prompts, args)
    drawn = run_packed(model, [job for pair in zip(neighbours, jobs, strict=True) for job in pair], args).outputs[1::2]
    for index, (job, beside) in enumerate(zip(jobs, drawn, strict=True)):
        reference, name = FromTransformers(), f"prompt {index}"
        alone = run_packed(model, [job], args, reference).outputs[0]
        if unequal := reference.unequal:
            done.faults.append(f"{name}: the distributions of new tokens {unequal} differ from transformers'")
        if beside != alone:
            done.faults.append(f"{name}: drawn beside neighbours {beside}, drawn alone {alone}")
    same = "" if done.faults else ", the same alone and from transformers' distributions"
    text = tokenizer.decode if (tokenizer := tokenizer_of(args)) else str
    done.lines = [f"Drawn at temperature {args.temperature:g} beside greedy neighbours{same}:"]
    done.lines += [f"[{index}] {text(ids)!r}" for index, ids in enumerate(drawn)]
    done.more = {"drawn": drawn}
    return done


def arguments():
    parser = make_parser(__doc__)
    knobs = parser.add_argument_group("the drawn answers")
    for name, (default, metavar, text) in KNOBS.items():
        option = f"--{name.replace('_', '-')}"
        knobs.add_argument(option, type=type(default), default=default, metavar=metavar, help=text)
    knobs.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="prompt i has N + i (default: 0)")
    return parser


def main(argv=None) -> int:
    return run_smoke(4, generate_both, arguments(), argv, one_alone=generate)


if __name__ == "__main__":
    sys.exit(main())

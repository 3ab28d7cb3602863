"""Course machinery. Finds where our run diverges from Hugging Face's, layer by layer, on the same tokens.

Hugging Face runs once over prompt and answer. Our model runs step by step, as in the lesson, and each value is compared
as soon as it is computed: after the embedding, each norm, the q and k norms, RoPE, attention, MLP, the last norm.
"""

import importlib
import sys

from scripts import ROOT
from scripts.smoke.arguments import load_ours
from scripts.smoke.divergence import explain
from scripts.smoke.hugging_face import load_hf
from scripts.smoke.report import print_json
from scripts.smoke.trial import Opened, Trial

from mini_engine.cli.parser import OneLineParser, guard, whole_number


def main(argv=None) -> int:
    first = OneLineParser(add_help=False)
    first.add_argument("--lesson", type=whole_number(0), default=None)
    lesson = first.parse_known_args(argv)[0].lesson
    names = {number: f"l{number}_smoke" for number in range(20) if (ROOT / f"scripts/l{number}_smoke.py").exists()}
    if lesson is not None and lesson not in names:
        print(f"there is no lesson {lesson}; the lessons: {', '.join(map(str, names))}", file=sys.stderr)
        return 2
    script = importlib.import_module(f"scripts.{names[lesson or 0]}")
    parser = script.arguments()
    parser.prog, parser.description = "explain_divergence.py", __doc__
    parser.add_argument("--lesson", type=int, default=0, help="the lesson whose engine to run (default: 0)")
    return guard(parser, lambda args: run(script, args), argv)


def run(script, args) -> int:
    """Print for each prompt where the runs diverge, if they do. Returns 0 if none does."""
    model, prompts = load_ours(args)
    hf_model, generate = load_hf(args.hf_model or args.model, args), generate_of(script)
    findings = [explain(model, hf_model, generate, ids, args.max_new_tokens, args) for ids in prompts]
    if args.json:
        print_json({"findings": [vars(finding) for finding in findings]})
    else:
        for index, finding in enumerate(findings):
            print(f"[{index}] {finding}")
    return int(any(not f.text.startswith("alone, this prompt agrees") for f in findings))


def generate_of(script):
    """Return what a script runs: its `generate`, or from lesson 9 on its first path."""
    if hasattr(script, "generate"):
        return script.generate
    kinds = (one for one in vars(script).values() if isinstance(one, type) and issubclass(one, Trial))
    kind, path = max(kinds, key=lambda one: len(one.mro())), next(iter(script.PATHS.values()))
    return lambda model, prompts, args: path(kind("explained", args, prompts, Opened(), model))


if __name__ == "__main__":
    sys.exit(main())

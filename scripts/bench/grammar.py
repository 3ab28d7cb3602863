"""Lesson 7. Suite `grammar`: the cost of a grammar in a step's sampling, and of compiling one."""

import time

from scripts.bench.common import Report
from scripts.bench.sampler import ROWS, rows_of, sampling
from scripts.bench.turns import take_turns

import torch

from mini_engine.grammars.compiler import GrammarCompiler
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer

TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["port", "mine", "spa"]}},
    },
    "required": ["name", "size", "tags"],
}
VOCABULARIES = {"the pocket model's": 2048, "padded to Qwen3's": 151_936}


def contenders(vocab_size: int, name: str) -> dict:
    """Return batches with and without a grammar, and a compilation."""
    compiler = GrammarCompiler(Tokenizer(POCKET_DIR), vocab_size, ())
    form = OutputForm(TOWN)
    bound = {"temperature": 0, "grammar": compiler.compile_sync(form)}
    free = {"temperature": 0}
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(0))
    return {
        (name, "no row has a grammar"): sampling(logits, [free] * ROWS),
        (name, "one row has one"): sampling(logits, [bound] + [free] * (ROWS - 1)),
        (name, "all rows have one"): sampling(logits, [bound] * ROWS),
        (name, "compile a schema"): lambda: compiler.compile_sync(form),
    }


def run(args) -> Report:
    """Measure milliseconds of processor time per batch, and per compilation."""
    found, rounds = {}, args.rounds or (5 if args.quick else 30)
    for name, size in VOCABULARIES.items():
        found |= take_turns(contenders(size, name), rounds, "grammar", clock=time.process_time)
    notes = [
        f"{ROWS} greedy rows; a vocabulary that is padded has no more tokens for llguidance to look at",
        "processor time of all threads: other programs on the machine do not count",
    ]
    return Report("grammar", rows_of(found), notes)

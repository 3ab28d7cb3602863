"""Lesson 6. Answers streamed as text: the tokens equal Hugging Face's, and the pieces of text add up to theirs."""

import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.assembly.llm import LLM
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.text.tokenizer import Tokenizer


def generate(model, prompts, args) -> Outcome:
    """Answer all prompts as streams read in turn, so that they share their steps."""
    engine = Engine.for_model(model, block_size=args.block_size, num_blocks=args.num_blocks)
    llm = LLM.for_engine(engine, Tokenizer.load(args.model))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens)
    streams = [llm.stream(ids, params) for ids in prompts]
    outputs, texts, open_streams = [[] for _ in prompts], [""] * len(prompts), list(range(len(prompts)))
    while open_streams:
        for index in list(open_streams):
            delta = next(streams[index])
            outputs[index] += delta.token_ids
            texts[index] += delta.text
            if delta.finish_reason:
                open_streams.remove(index)
    wanted = [llm.tokenizer.decode(ids) for ids in outputs]
    faults = [
        f"answer {i} was streamed as {a!r}; decoded at once it is {b!r}" for i, (a, b) in text_faults(texts, wanted)
    ]
    blocks = llm.engine.scheduler.manager.blocks_by_state
    kv = {"layout": "block-tensor", "bytes": llm.engine.runner.pool.bytes, "block_size": args.block_size}
    return Outcome(outputs, kv | {"held_at_end": blocks.held}, faults)


def text_faults(texts, wanted):
    """Return (index, (streamed, decoded at once)) for each answer where the two differ."""
    return [(i, pair) for i, pair in enumerate(zip(texts, wanted, strict=True)) if pair[0] != pair[1]]


def arguments():
    parser = make_parser(__doc__, block_size=16)
    parser.add_argument("--num-blocks", type=whole_number(2), default=512, metavar="N", help="default: 512")
    return parser


def main(argv=None) -> int:
    return run_smoke(6, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())

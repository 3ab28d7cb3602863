"""Lesson 5. Suite `serve`: requests of mixed lengths, ours against transformers' padded batch and continuous batching.

All contenders run the same weights in the same process, in interleaved rounds. Only requested tokens count: a padded
batch runs until its longest answer is done. End tokens are ignored, so that all do the same work.
"""

import logging
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from scripts.bench.common import Report, take_turns
from scripts.make_random_qwen3 import SHAPES, write_random

import torch

from mini_engine.checkpoint.config import DTYPES
from mini_engine.errors import UserError


def add_arguments(parser) -> None:
    """Add this suite's options."""
    from mini_engine.cli.parser import whole_number

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this size instead")
    parser.add_argument("--requests", type=whole_number(1), default=32, metavar="N", help="default: 32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def load_of(requests: int, vocab_size: int, quick: bool) -> list[tuple[list[int], int]]:
    """Return (prompt, tokens wanted) pairs: prompts of 4 to 256 tokens, answers of 4 to 96, mostly short."""
    chance, scale = random.Random(0), 2 if quick else 1

    def length(most: int) -> int:
        return max(4, int(most * chance.random() ** 2 / scale))

    return [([chance.randrange(vocab_size) for _ in range(length(256))], length(96)) for _ in range(requests)]


# ---------------------------------------------------------------- contenders: each returns the answers in order


def ours(model, load, share: float):
    """Return a run of this lesson's engine, with a pool of `share` of the requests' total need."""
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.offline import generate_all
    from mini_engine.engine.sampling_params import SamplingParams

    needs = [-(-(len(prompt) + wanted) // 16) for prompt, wanted in load]
    engine = Engine.for_model(model, num_blocks=max(max(needs), int(share * sum(needs))) + 1)
    params = [SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True) for _, wanted in load]

    def run() -> list[list[int]]:
        completions = generate_all(engine, [prompt for prompt, _ in load], params, progress=False)
        return [completion.token_ids for completion in completions]

    return run


def padded(hf_model, load):
    """Return a run of transformers' `generate`: one left-padded batch, as many steps as the longest answer."""
    width = max(len(prompt) for prompt, _ in load)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in load], device=hf_model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in load], device=ids.device)
    most = max(wanted for _, wanted in load)

    def run() -> list[list[int]]:
        with torch.inference_mode():
            out = hf_model.generate(ids, attention_mask=mask, max_new_tokens=most)
        return [row[width : width + wanted].tolist() for row, (_, wanted) in zip(out, load, strict=True)]

    return run


def tuned_config(num_blocks: int = 0):
    """Return a config for continuous batching, with at least `num_blocks` blocks of 32 tokens.

    transformers' own defaults size its cache for a GPU; on two cores these sizes are several times faster.
    """
    from transformers import ContinuousBatchingConfig

    return ContinuousBatchingConfig(page_size=32, num_blocks=max(128, num_blocks), max_batch_tokens=1024)


def continuous(hf_model, load):
    """Return a run of the continuous batching behind `generate_batch`, each request with its own length.

    Raises:
        UserError: it cannot run here.
    """
    from transformers import GenerationConfig

    config = tuned_config()
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run() -> list[list[int]]:
        answers = {}
        with hf_model.continuous_batching_context_manager(
            greedy, continuous_batching_config=config, persistent_manager=True
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=wanted, eos_token_id=-1) for prompt, wanted in load]
            while len(answers) < len(load):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise UserError("its thread ended before all answers were complete")
                if result is not None and result.is_finished():
                    answers[result.request_id] = result.generated_tokens
        return [list(answers[name]) for name in names]

    return run


def contenders(model, load_hf, load) -> dict:
    """Return the contenders that run here; name the others on stderr.

    transformers' two get a model each, because one of them modifies it.
    """
    ready = {
        "ours": ours(model, load, 1.0),
        "ours, a quarter of the blocks": ours(model, load, 0.25),
        "transformers generate, padded": padded(load_hf(), load),
    }
    try:
        hf_model = load_hf()
        continuous(hf_model, load[:2])()
        ready["transformers generate_batch"] = continuous(hf_model, load)
    except Exception as error:  # it may lack anything here
        sys.stderr.write(f"left out: transformers generate_batch; it cannot run here ({str(error).splitlines()[0]})\n")
    return ready


def run(args) -> Report:
    """Measure seconds and tokens/s of each contender, and its time relative to ours."""
    from scripts.smoke.arguments import pick_device

    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        model, load_hf = both_models(args, Path(folder), pick_device(args.device))
        load = load_of(args.requests, model.config.vocab_size, args.quick)
        ready = contenders(model, load_hf, load)
    answers = {name: work() for name, work in ready.items()}
    timings = take_turns(ready, args.rounds or (1 if args.quick else 5), "serve")
    total = sum(wanted for _, wanted in load)
    rows = [
        {
            "contender": name,
            "seconds": timing.median,
            "new tokens/s": total / timing.median,
            "times ours": timing.median / timings["ours"].median,
            "answers as ours": f"{equal(answers[name], answers['ours'])}/{len(load)}",
            "± %": timing.spread * 100,
        }
        for name, timing in timings.items()
    ]
    prompts = sum(len(prompt) for prompt, _ in load)
    note = f"{len(load)} requests, {prompts} prompt tokens, {total} new tokens, {args.dtype} on {model.device}"
    return Report("serve", rows, [note], drawn="new tokens/s")


def equal(answers, others) -> int:
    return sum(a == b for a, b in zip(answers, others, strict=True))


def both_models(args, folder: Path, device: str):
    """Return our model, and a function that loads the same weights in transformers, greedy and without end tokens."""
    from scripts.smoke import hugging_face
    from scripts.smoke.arguments import pocket_dir

    from transformers import GenerationConfig

    from mini_engine.checkpoint.weights import load_model, resolve_checkpoint

    dtype, path = DTYPES[args.dtype], args.model or pocket_dir()
    if args.shape:
        write_random(folder, args.shape, args.dtype)
        path = folder
    directory = resolve_checkpoint(path)

    def load_hf():
        hf_model = hugging_face.load_hf(directory, Namespace(dtype=args.dtype, device=device))
        hf_model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        return hf_model

    return load_model(directory, dtype, device), load_hf

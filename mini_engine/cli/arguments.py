"""Lesson 6. Options shared by the engine's commands. Imports torch only when it is needed."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mini_engine.cli.parser import json_object, whole_number

OWNED = re.compile(r"[\w-][\w.-]*/\w[\w.-]*")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the checkpoint, its dtype and its device."""
    parser.add_argument(
        "--model",
        metavar="DIR_OR_HUB_ID",
        help="a checkpoint, pocket-hybrid, pocket-windows or pocket-latent (default: the pocket model)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto, float32, bfloat16 or float16 (default: auto: on a CPU bfloat16 for a bfloat16 checkpoint if "
        "the processor has bfloat16 products, otherwise float32)",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model, the layers, and the memory of the KV pool."""
    add_model_options(parser)
    parser.add_argument(
        "--backend",
        choices=["auto", "packed", "torch", "fused", "reference"],
        default="auto",
        help="the code that runs the layers; fused is for GPUs (default: the fastest that works)",
    )
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay captured decode steps on a GPU (default: if that works)",
    )
    parser.add_argument("--block-size", type=whole_number(1), default=16, metavar="N", help="default: 16")
    parser.add_argument(
        "--num-blocks", type=whole_number(2), metavar="N", help="blocks of the KV pool (default: 1 GiB)"
    )
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share prefixes between requests (default: yes)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=["auto", "int8", "int4"],
        default="auto",
        help="int8: twice the tokens in the same memory, and slightly different answers; int4: three times the tokens, "
        "less accurate (default: the model's dtype)",
    )
    add_step_options(parser)
    add_tier_options(parser)
    add_handover_options(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for sharing a step between processes (lesson 18) and for steps of several tokens (lesson 14)."""
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tensor_parallel_size",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="processes that share the model's heads (default: 1)",
    )
    parser.add_argument(
        "--speculate",
        type=whole_number(1),
        nargs="?",
        const=8,
        metavar="K",
        help="guess up to K tokens ahead from the text itself and verify them together (K: 8; default: no guesses)",
    )


def add_tier_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for keeping evicted prefixes (lesson 12)."""
    parser.add_argument("--kv-cache-dir", metavar="DIR", help="keep computed KV here, also for the next start")
    parser.add_argument(
        "--kv-host-bytes", type=whole_number(0), metavar="N", help="memory for evicted KV (default: 256 MiB with a DIR)"
    )
    parser.add_argument("--kv-cache-key-file", metavar="FILE", help="at least 32 random bytes that seal what is in DIR")
    parser.add_argument("--kv-always", action="store_true", help="load KV from a tier even where recomputing is faster")
    parser.add_argument("--kv-disk-bytes", type=whole_number(0), metavar="N", help="size limit of DIR (default: 4 GiB)")


def add_handover_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for computing prompts in other processes (lesson 19)."""
    parser.add_argument(
        "--prefill-workers",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="processes that compute prompts, so that running answers need not wait for them (default: 0)",
    )
    parser.add_argument(
        "--handover-bytes", type=whole_number(1), metavar="N", help="shared memory for their KV (default: 256 MiB)"
    )
    parser.add_argument(
        "--handover-min-tokens", type=whole_number(0), metavar="N", help="compute shorter prompts here (default: 64)"
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options for choosing tokens and ending an answer. Defaults: the checkpoint's, otherwise greedy."""
    parser.add_argument(
        "--max-tokens", type=whole_number(1), default=max_tokens, metavar="N", help="the most tokens in an answer"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy (default: from generation_config.json, as for top-k and top-p, otherwise 0)",
    )
    parser.add_argument("--top-k", type=whole_number(-1), metavar="K", help="keep the K best tokens (default: all)")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the best tokens that add up to P (default: 1)")
    parser.add_argument("--seed", type=whole_number(-(2**63)), metavar="N", help="the same seed draws the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer here; repeatable")


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for variables of the chat template."""
    parser.add_argument(
        "--chat-template-kwargs",
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="more variables for the chat template, such as '{\"enable_thinking\": false}'",
    )


def sampling_params(args: argparse.Namespace, suggested: Mapping[str, Any]):
    """Return the SamplingParams that `args` asks for. suggested: the checkpoint's, used for options left out."""
    from mini_engine.engine.sampling_params import GREEDY, SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return SamplingParams(**{"temperature": GREEDY, **suggested, **given})


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of a step (lesson 5)."""
    parser.add_argument(
        "--max-num-seqs", type=whole_number(1), default=64, metavar="N", help="requests that run at once (default: 64)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=whole_number(1), default=512, metavar="N", help="per step (default: 512)"
    )
    parser.add_argument(
        "--chunked-prefill-size", type=whole_number(1), default=512, metavar="N", help="per prompt (default: 512)"
    )
    parser.add_argument(
        "--watermark", type=float, default=0.5, metavar="X", help="blocks kept free per running request (default: 0.5)"
    )
    parser.add_argument("--reserve-answers", action="store_true", help="admit only what needs no preemption")


def scheduler_config(args: argparse.Namespace):
    """Return the SchedulerConfig that `args` asks for. The server sets the order (lesson 7)."""
    from mini_engine.engine.scheduler_config import SchedulerConfig

    names = ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "watermark", "reserve_answers")
    return SchedulerConfig(**{name: getattr(args, name) for name in names}, policy="priority")


def load_llm(args: argparse.Namespace, scheduler_config: Any = None):
    """Load the LLM that `args` asks for. scheduler_config: the limits of a step, for a command that takes them."""
    from mini_engine.assembly.engine_config import EngineConfig
    from mini_engine.assembly.llm import LLM
    from mini_engine.cli.dtype import chosen_dtype

    config = EngineConfig(
        backend=args.backend,
        cuda_graphs=args.cuda_graphs,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        scheduler_config=scheduler_config,
        enable_prefix_caching=args.prefix_caching,
        kv_dtype=args.kv_dtype,
        kv_cache_dir=args.kv_cache_dir,
        kv_host_bytes=args.kv_host_bytes,
        kv_disk_bytes=args.kv_disk_bytes,
        kv_cache_key_file=args.kv_cache_key_file,
        kv_always=args.kv_always,
        tensor_parallel_size=args.tensor_parallel_size,
        prefill_workers=args.prefill_workers,
        handover_bytes=args.handover_bytes,
        handover_min_tokens=args.handover_min_tokens,
        speculate=args.speculate,
    )
    tokenizer = tokenizer_of(args.model)
    dtype, why = chosen_dtype(args.model, args.dtype, args.device)
    if why:
        print(why, file=sys.stderr)
    return LLM(tokenizer.directory, tokenizer=tokenizer, dtype=dtype, device=args.device, config=config)


def tokenizer_of(model: str | None):
    """Return the tokenizer of `--model`. UserError if the model's kind does not run here."""
    from mini_engine.assembly.loading import check_kind
    from mini_engine.checkpoint.directory import resolve_checkpoint
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    directory = resolve_checkpoint(POCKET_DIR if model is None else model)
    check_kind(directory)
    return Tokenizer(directory)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C set a flag that the yielded function reads. A second Ctrl-C stops the program as usual."""
    import signal

    pressed = []

    def note(number, frame) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def model_names(model: str | None, given: str | None) -> list[str]:
    """Return the model's names in the API: the given one, or its folder's name, preceded by owner/name for a hub id."""
    if given or not model:
        return [given or "pocket"]
    path = Path(model)
    name = path.resolve().name if path.name in ("", "..") else path.name
    return [name or "model"] + [model] * bool(OWNED.fullmatch(model))

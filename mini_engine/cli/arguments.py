"""Lesson 6. Options shared by the engine's commands. Imports torch only when it is needed."""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_engine.assembly.engine_config import CHOICES, LEAST, EngineConfig
from mini_engine.cli.parser import json_object, whole_number
from mini_engine.engine.scheduler_config import LEAST as LEAST_OF_STEP
from mini_engine.engine.scheduler_config import SchedulerConfig

OWNED = re.compile(r"[\w-][\w.-]*/\w[\w.-]*")
ENGINE_OPTIONS = {  # fields of EngineConfig
    "backend": "the code that runs the layers; fused is for GPUs (default: the fastest that works)",
    "cuda_graphs": "replay captured decode steps on a GPU (default: if that works)",
    "block_size": "default: 16",
    "num_blocks": "blocks of the KV pool (default: 1 GiB)",
    "enable_prefix_caching": "share prefixes between requests (default: yes)",
    "eviction_policy": "which cached prefix is evicted first (default: lru)",
    "tlru_threshold": "for tlru: tokens that a turn may compute without being late",
    "tlru_next_prompt_estimate": "for tlru: tokens that a turn adds (default: 0)",
    "enable_sessions": "evict what sessions need last; clients name theirs in session_id (default: no)",
    "longest_prefix_first": "admit waiting requests by the length of their cached prefix",
    "kv_dtype": "int8: twice the tokens in the same memory, and slightly different answers; int4: three times the "
    "tokens, less accurate (default: the model's dtype)",
    "tensor_parallel_size": "processes that share the model's heads (default: 1)",
    "kv_cache_dir": "keep computed KV here, also for the next start",
    "kv_host_bytes": "memory for evicted KV (default: 256 MiB with a DIR)",
    "kv_cache_key_file": "at least 32 random bytes that seal what is in DIR",
    "kv_always": "load KV from a tier even where recomputing is faster",
    "kv_disk_bytes": "size limit of DIR (default: 4 GiB)",
    "kv_events": "publish there what the prefix cache holds, with the tokens of all prompts (default: nowhere)",
    "kv_events_replay": "publish missed events again there",
    "kv_events_format": "array: for subscribers of vLLM before 0.24 (default: map)",
    "prefill_workers": "processes that compute prompts, so that running answers need not wait for them (default: 0)",
    "handover_bytes": "shared memory for their KV (default: 256 MiB)",
    "handover_min_tokens": "compute shorter prompts here (default: 64)",
}
STEP_OPTIONS = {  # fields of SchedulerConfig; the server sets the policy
    "max_num_seqs": "requests that run at once (default: 64)",
    "max_num_batched_tokens": "per step (default: 512)",
    "chunked_prefill_size": "per prompt (default: 512)",
    "watermark": "blocks kept free per running request (default: 0.5)",
    "reserve_answers": "admit only what needs no preemption",
    "overtaking": "how much later a prompt may finish because short ones overtake it (default: 0.1, a tenth)",
}
SHORT = {
    "enable_prefix_caching": ["--prefix-caching"],
    "enable_sessions": ["--sessions"],
    "tensor_parallel_size": ["--tp", "--tensor-parallel-size"],
}


def add_fields(parser: argparse.ArgumentParser, config: type, texts: Mapping[str, str]) -> None:
    """Add an option for each of these fields of a config. texts: what --help says about it."""
    for name, text in texts.items():
        default, least = config.__dataclass_fields__[name].default, (LEAST | LEAST_OF_STEP).get(name)
        if least is not None:
            form: dict[str, Any] = dict(type=whole_number(least), metavar="N")
        elif name in CHOICES:
            form = dict(choices=CHOICES[name])
        elif name in ("kv_events", "kv_events_replay"):
            form = dict(metavar="ENDPOINT")
        elif name.startswith("kv_cache"):
            form = dict(metavar=name.rpartition("_")[2].upper())
        elif isinstance(default, bool | None):
            form = dict(action="store_true" if default is False else argparse.BooleanOptionalAction)
        else:
            form = dict(type=float, metavar="X")
        flags = SHORT.get(name, [f"--{name.replace('_', '-')}"])
        parser.add_argument(*flags, dest=name, default=default, help=text, **form)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the checkpoint, its dtype and device, and for the engine."""
    add = parser.add_argument
    what = "a checkpoint, pocket-hybrid, pocket-windows or pocket-latent (default: the pocket model)"
    add("--model", metavar="DIR_OR_HUB_ID", help=what)
    what = (
        "auto, float32, bfloat16 or float16 (default: auto: on a CPU bfloat16 for a bfloat16 checkpoint if the "
        "processor has bfloat16 products, otherwise float32)"
    )
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help=what)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add_fields(parser, EngineConfig, ENGINE_OPTIONS)
    what = "guess up to K tokens ahead from the text itself and verify them together (K: 8; default: no guesses)"
    add("--speculate", type=whole_number(1), nargs="?", const=8, metavar="K", help=what)


def add_answer_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options of a command that answers prompts."""
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens)
    add_template_option(parser)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options for choosing tokens and ending an answer. Defaults: the checkpoint's, otherwise greedy."""
    add = parser.add_argument
    add("--max-tokens", type=whole_number(1), default=max_tokens, metavar="N", help="the most tokens in an answer")
    what = "0 is greedy (default: from generation_config.json, as for top-k and top-p, otherwise 0)"
    add("--temperature", type=float, metavar="T", help=what)
    add("--top-k", type=whole_number(-1), metavar="K", help="keep the K best tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="keep the best tokens that add up to P (default: 1)")
    add("--seed", type=whole_number(-(2**63)), metavar="N", help="the same seed draws the same answer")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer here; repeatable")


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for variables of the chat template."""
    flags = ("--chat-template-kwargs", "--default-chat-template-kwargs")
    what = "more variables for the chat template, such as '{\"enable_thinking\": false}'"
    parser.add_argument(*flags, type=json_object, default={}, metavar="JSON", help=what)


def sampling_params(args: argparse.Namespace, suggested: Mapping[str, Any]):
    """Return the SamplingParams that `args` asks for. suggested: the checkpoint's, used for options left out."""
    from mini_engine.engine.sampling_params import GREEDY, SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return SamplingParams(**{"temperature": GREEDY, **suggested, **given})


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """Return the SchedulerConfig that `args` asks for. The server sets the order (lesson 7)."""
    return SchedulerConfig(**{name: getattr(args, name) for name in STEP_OPTIONS}, policy="priority")


def load_llm(args: argparse.Namespace, scheduler_config: SchedulerConfig | None = None):
    """Load the LLM that `args` asks for. scheduler_config: the limits of a step, for a command that takes them."""
    from mini_engine.assembly.llm import LLM
    from mini_engine.cli.dtype import chosen_dtype

    options = {name: getattr(args, name) for name in (*ENGINE_OPTIONS, "speculate")}
    config = EngineConfig(**options, scheduler_config=scheduler_config)
    tokenizer = tokenizer_of(args.model)
    dtype, why = chosen_dtype(args.model, args.dtype, args.device)
    if why:
        print(why, file=sys.stderr)
    return LLM(tokenizer.directory, tokenizer=tokenizer, dtype=dtype, device=args.device, config=config)


def tokenizer_of(model: str | None):
    """Return the tokenizer of `--model`. UserError if the model's kind does not run here."""
    from mini_engine.assembly.loading import reader_of
    from mini_engine.checkpoint.directory import resolve_checkpoint
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    directory = resolve_checkpoint(POCKET_DIR if model is None else model)
    reader_of(directory).shape(directory)  # its errors come first
    return Tokenizer(directory)


def model_names(model: str | None, given: str | None) -> list[str]:
    """Return the model's names in the API: the given one, or its folder's name, preceded by owner/name for a hub id."""
    if given or not model:
        return [given or "pocket"]
    path = Path(model)
    name = path.resolve().name if path.name in ("", "..") else path.name
    return [name or "model"] + [model] * bool(OWNED.fullmatch(model))

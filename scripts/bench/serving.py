"""Course machinery. Suite `serving`: our server against vLLM's on one checkpoint, with the same streaming clients.

Both servers are started, timed until they answer, and kept running; then they take turns at each load: clients that ask
again when answered (closed loop), and arrivals at several rates whatever the server does (open loop). vLLM needs its
own environment:

    python scripts/bench.py serving --vllm-python DIR/bin/python      (or the variable MINI_ENGINE_VLLM_PYTHON)

The checkpoint has random weights and a tokenizer with a text for every id: without text, there is no event. Prompts are
token ids.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, checkpoint_of, link_or_copy
from scripts.bench.peer_places import VLLM as VLLM_PLACE
from scripts.bench.peer_places import add_places, vllm_python
from scripts.bench.peer_protocol import PeerError
from scripts.bench.runs import Jobs
from scripts.bench.server_process import free_port, started
from scripts.bench.serving_client import MODEL, MOST_FIRST, MOST_TOKEN, Load, figures

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.cli.parser import whole_number
from mini_engine.engine.scheduler_config import SchedulerConfig

OURS, VLLM = "ours", "vLLM"
POOL_BYTES, MOST_TOKENS = 2**30, 2048
PAUSE = 2.0  # seconds before each run: the other server's threads stop spinning, vLLM's worker after one second


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_places(parser, VLLM_PLACE)
    parser.add_argument(
        "--step-tokens", nargs="+", type=whole_number(SchedulerConfig.max_num_seqs), default=[], metavar="N",
        help="another of our servers for each of these limits of tokens a step (default: none, only `serve`'s own)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only loads whose names begin with one of these")


# ---------------------------------------------------------------- the checkpoint and the loads


def with_texts(model: Path) -> Path:
    """Return a folder with the checkpoint's weights and a byte-level tokenizer that has a text for every id."""
    folder = model.with_name(f"{model.name}-texts")
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in [*model.glob("*.safetensors"), model / "config.json"]:
        link_or_copy(file, folder)
    vocabulary = {f"Ġt{i}": i for i in range(Qwen3Config.from_dir(model).vocab_size)}  # Ġ stands for a space
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def loads_of(vocab_size: int, quick: bool) -> dict[str, Load]:
    """Return the loads by name."""
    chance = random.Random(0)

    def jobs(count: int, prompt: int, wanted: int = 32, common: int = 0) -> Jobs:
        start = chance.choices(range(vocab_size), k=common)
        return [(start + chance.choices(range(vocab_size), k=prompt), wanted) for _ in range(count)]

    if quick:
        return {"closed, 4": Load(jobs(8, 16, 8), at_once=4), "open, 4 a second": Load(jobs(8, 16, 8), rate=4.0)}
    loads = {f"closed, {n}": Load(jobs(count, 64), at_once=n) for n, count in ((1, 6), (8, 32), (32, 96))}
    loads["closed, 8, prompts of 512"] = Load(jobs(16, 512), at_once=8)
    loads["closed, 8, 512 shared"] = Load(jobs(32, 16, common=512), at_once=8)
    for rate, count in ((0.5, 15), (1.0, 30), (1.5, 45), (2.0, 60)):
        loads[f"open, {rate:g} a second"] = Load(jobs(count, 64), rate=rate)
    return loads


# ---------------------------------------------------------------- the servers


def ours(args) -> dict[str, list[str]]:
    """Map the names of our servers to their options; the first, the baseline, has `serve`'s own limits."""
    limits = {f"{OURS}, {number} a step": str(number) for number in dict.fromkeys(args.step_tokens)}
    options = {
        name: ["--max-num-batched-tokens", most, "--chunked-prefill-size", most] for name, most in limits.items()
    }
    return {OURS: []} | options


def commands(name: str, args, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return a server's command and environment.

    Raises:
        UserError: there is no such server here.
    """
    if (limits := ours(args).get(name)) is not None:
        own = ["--model", str(model), "--dtype", args.dtype, "--model-name", MODEL]
        return [sys.executable, "-m", "mini_engine", "serve", *own, *limits, "--port", str(port)], {}
    try:
        python, environment = vllm_python(args)
    except PeerError as why:
        raise UserError(str(why)) from None
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else "all"
    environment |= {"VLLM_CPU_KVCACHE_SPACE": str(POOL_BYTES >> 30), "VLLM_CPU_OMP_THREADS_BIND": cores}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    own = ["--dtype", args.dtype, "--served-model-name", MODEL, "--max-model-len", str(MOST_TOKENS)]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    entry = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())]  # `vllm serve`'s own
    return [*entry, *own, "--enable-prefix-caching", *where], environment


@contextmanager
def server(name: str, args, model: Path) -> Iterator[tuple[str, float]]:
    """Yield a server's address and the seconds from its command to its first answer; stop it at the end.

    Raises:
        UserError: it cannot be started here, ends, or does not answer in time.
    """
    port = free_port()
    command, environment = commands(name, args, model, port)
    with started(name, command, f"http://127.0.0.1:{port}", "/health", environment) as found:
        yield found


# ---------------------------------------------------------------- rounds


def run(args) -> Report:
    """Measure every load on every server that runs here."""
    model = with_texts(checkpoint_of(args))
    loads = loads_of(Qwen3Config.from_dir(model).vocab_size, args.quick)
    chosen = {name: load for name, load in loads.items() if any(map(name.startswith, args.only or [""]))}
    notes = [f"{model}, {args.dtype}; good: a first token in {MOST_FIRST:g} s, later ones {MOST_TOKEN:g} s each"]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ready, starts = {}, []
        for name in (*ours(args), VLLM):
            try:
                ready[name], seconds = stack.enter_context(server(name, args, model))
                starts.append({"server": name, "from its command to serving, s": seconds})
                warm_up(ready[name])
            except UserError as why:
                notes.append(f"left out: {name}; {why}")
        for name, load in chosen.items():
            found: dict[str, list[dict[str, float]]] = {one: [] for one in ready}
            for number in range(1, (args.rounds or (1 if args.quick else 2)) + 1):
                for one, url in ready.items():
                    time.sleep(PAUSE)
                    found[one].append(figures(url, fresh(load, number)))
                    sys.stderr.write(f"{name}, round {number}: {one} {found[one][-1]['tokens/s']:.1f} tokens/s\n")
            rows += rows_of(name, found)
    return Report("serving", rows, notes, more=starts)


def warm_up(url: str) -> None:
    """Warm up a server: short and long prompts, alone and together."""
    for length in (16, 256):
        jobs = [([(7 * i + j) % 1000 for j in range(length)], 4) for i in range(8)]
        figures(url, Load(jobs, at_once=4))


def fresh(load: Load, number: int) -> Load:
    """Return the load with other ids, so that no round finds the previous one in a prefix cache."""
    return Load([([token ^ number for token in ids], wanted) for ids, wanted in load.jobs], load.at_once, load.rate)


def rows_of(load: str, found: dict[str, list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each server: medians over the rounds."""
    for name, rounds in found.items():
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        ours = statistics.median(one["tokens/s"] for one in found[OURS]) if OURS in found else None
        yield {"load": load, "server": name} | medians | {"ours is ×": ours / medians["tokens/s"] if ours else None}

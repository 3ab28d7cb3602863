"""Course machinery. One engine in its own process, driven over pipes: a line of JSON in, a line of JSON out.

    {"do": "load", "engine": NAME, "model": DIR, "dtype": "bfloat16", "threads": 2, "pool_gib": 1, "longest": 2048,
     "at_once": 32, "text": 544, "token_bytes": 114688}                               -> version, pool_bytes
    {"do": "run", "jobs": [[[prompt ids], tokens wanted], ...]}                       -> a Watch's figures
    {"do": "quit"}                                                                    -> peak_bytes

An answer may also be {"error": "..."}. This module runs under the Pythons of other environments, so it imports the
engine only to run it. Nothing that an engine prints gets into the answers.
"""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.bench import runs
from scripts.bench.runs import Way

Loaded = tuple[str, int, Way]  # version, bytes of the KV pool, a way to run jobs
BATCH_TOKENS = 2048  # per step, for every engine with such a setting

# ---------------------------------------------------------------- engines: each function loads one


def our_engine(request: dict):
    """Return this course's engine, with lesson 9's layers and lesson 8's tree."""
    import torch

    from mini_engine.engine.engine import Engine
    from mini_engine.engine.scheduler_config import SchedulerConfig
    from mini_engine.families.qwen3 import load_model
    from mini_engine.kv.cache_coordinator import caching_manager
    from mini_engine.layers import speed_up

    model = speed_up(load_model(request["model"], getattr(torch, request["dtype"])))
    limits = SchedulerConfig(max_num_batched_tokens=BATCH_TOKENS, chunked_prefill_size=BATCH_TOKENS)
    pool_bytes = request["pool_gib"] * 2**30
    return Engine.for_model(model, kv_bytes=pool_bytes, scheduler_config=limits, manager=caching_manager)


def load_ours(request: dict) -> Loaded:
    """Load this course's engine."""
    import torch

    engine = our_engine(request)
    return f"torch {torch.__version__}", engine.runner.pool.bytes, runs.ours(engine)


def load_padded(request: dict) -> Loaded:
    """Load transformers' `generate`."""
    import transformers

    return transformers.__version__, 0, runs.padded(runs.load_hf(request["model"], request["dtype"]))


def load_vllm(request: dict) -> Loaded:
    """Load vLLM's CPU build: compiled, prefix cache on, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=str(request["pool_gib"]), VLLM_NO_USAGE_STATS="1"
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # pyright: ignore[reportMissingImports]  (in an environment of its own)

    engine = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        max_model_len=request["longest"],
        max_num_seqs=64,
        max_num_batched_tokens=BATCH_TOKENS,
        enable_prefix_caching=True,
    ).llm_engine
    return vllm.__version__, request["pool_gib"] * 2**30, runs.vllm(engine)


def load_llama(request: dict) -> Loaded:
    """Load llama.cpp: its server, and clients that stream."""
    from scripts.bench.peer_llama import load_llama

    return load_llama(request)


def load_openvino(request: dict) -> Loaded:
    """Load OpenVINO GenAI's continuous batching."""
    from scripts.bench.peer_openvino import load_openvino

    return load_openvino(request)


ENGINES = {
    "ours": load_ours,
    "ours without a compiler": load_ours,
    "transformers generate": load_padded,
    "vllm": load_vllm,
    "llama.cpp": load_llama,
    "openvino": load_openvino,
}

# ---------------------------------------------------------------- the loop


def peak_bytes() -> int:
    """Return the peak memory in bytes of this process's largest child or of itself; 0 if the system does not report it.

    An engine that is a program of its own is a child, and what this process needs to start it does not count.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        return max(map(peak_of, children or ["self"]))
    except OSError:
        return 0


def peak_of(process: str) -> int:
    """Return a process's peak memory in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def answer(state: dict, request: dict) -> dict:
    """Carry out one request."""
    if request["do"] == "load":
        import torch

        torch.set_num_threads(request["threads"])
        version, pool_bytes, state["way"] = ENGINES[request["engine"]](request)
        return {"version": version, "pool_bytes": pool_bytes}
    if request["do"] == "run":
        return runs.watch(state["way"], [request["jobs"]])[0].figures()
    return {"peak_bytes": peak_bytes()}


def serve(answer: Callable[[dict], dict]) -> None:
    """Answer requests until told to quit or until the input ends; then end the process, whatever it still does."""
    questions, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine or a compiler prints goes to stderr
    for (
        line
    ) in questions:  # not sys.stdin: what is called here may set its encoding, which fails while it is being read
        request = json.loads(line)
        try:
            said = answer(request)
        except KeyboardInterrupt:  # the terminal's Ctrl-C reaches this process too; the client reports it
            break
        except (
            Exception
        ) as error:  # an engine, a compiler or a driver may raise anything; the client decides what to do
            lines = str(error).strip().splitlines() or ["it says no more"]
            said = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
        if request["do"] == "quit":
            break
    answers.close()
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():  # an engine may be a child, such as llama.cpp's server
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # an engine's threads might keep the process alive


if __name__ == "__main__":
    serve(partial(answer, {}))

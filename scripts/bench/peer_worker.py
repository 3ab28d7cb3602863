"""Course machinery. One engine in its own process, driven over pipes: a line of JSON in, a line of JSON out.

    {"do": "load", "engine": NAME, "model": DIR, "dtype": "bfloat16", "threads": 2}   -> version, pool_bytes
    {"do": "run", "jobs": [[[prompt ids], tokens wanted], ...]}                       -> a Watch's figures
    {"do": "quit"}                                                                    -> peak_bytes

An answer may also be {"error": "..."}. This file runs under the Pythons of other environments, so it imports the course
only to run the course's own engine. Nothing that an engine prints gets into the answers.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Jobs = list  # of [prompt ids, tokens wanted]
# After each step: job number to its number of tokens so far; and its time, if the engine yields all steps afterwards.
Step = tuple[dict[int, int], float | None]
Run = Callable[[Jobs], Iterator[Step]]
Loaded = tuple[str, int, Run]  # version, bytes of the KV pool, function that runs jobs
POOL_BYTES = 2**30
BATCH_TOKENS = 2048  # per step, for every engine with such a setting


class Watch:
    """Times a run. Decode is timed from the moment when every job has its first token."""

    def __init__(self, jobs: Jobs) -> None:
        self.wanted = [wanted for _, wanted in jobs]
        self.have = [0] * len(jobs)
        self.begun = self.now = time.perf_counter()
        self.all_began: float | None = None
        self.tokens_before = 0

    def note(self, counts: dict[int, int]) -> None:
        """Record the end of a step."""
        self.now = time.perf_counter()
        for job, count in counts.items():
            self.have[job] = min(count, self.wanted[job])
        if self.all_began is None and all(self.have):
            self.all_began, self.tokens_before = self.now, sum(self.have)

    def figures(self) -> dict[str, float]:
        """Return the total seconds, and the tokens and seconds of decode alone."""
        if self.have != self.wanted or self.all_began is None:
            raise RuntimeError(f"{sum(self.wanted)} tokens were wanted and {sum(self.have)} came")
        return {
            "seconds": self.now - self.begun,
            "decode_tokens": sum(self.have) - self.tokens_before,
            "decode_seconds": self.now - self.all_began,
        }


# ---------------------------------------------------------------- engines: each loads one


def load_ours(request: dict) -> Loaded:
    """Load this course's engine: "ours plain" with the layers of lessons 0 to 8, the others with lesson 9's."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    from mini_engine.checkpoint.weights import load_model
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import SchedulerConfig
    from mini_engine.kv.prefix_cache import PrefixCache, caching_manager

    model = load_model(request["model"], getattr(torch, request["dtype"]))
    if request["engine"] != "ours plain":
        from mini_engine.layers import speed_up

        model = speed_up(model)
    limits = SchedulerConfig(max_num_batched_tokens=BATCH_TOKENS, chunked_prefill_size=BATCH_TOKENS)
    engine = Engine.for_model(model, kv_bytes=POOL_BYTES, scheduler_config=limits, manager=caching_manager)

    def run(jobs: Jobs) -> Iterator[Step]:
        manager = engine.scheduler.manager
        if isinstance(manager.prefixes, PrefixCache):
            manager.prefixes.clear()
        params = [SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True) for _, wanted in jobs]
        requests = [engine.add_request(str(i), ids, params[i]) for i, (ids, _) in enumerate(jobs)]
        while engine.has_unfinished:
            names = engine.step().new_tokens
            yield {int(name): len(requests[int(name)].output_ids) for name in names}, None

    return f"torch {torch.__version__}", engine.runner.pool.bytes, run


def load_transformers(request: dict):
    """Load the model with transformers. Return it and transformers' version."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, request["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model, transformers.__version__


def load_padded(request: dict) -> Loaded:
    """Load for `generate`: one batch, padded on the left, as many steps as the longest answer has tokens."""
    model, version = load_transformers(request)
    return version, 0, padded(model)


def padded(model) -> Run:
    """Return a function that runs jobs with `generate` of a transformers model."""
    import torch

    def run(jobs: Jobs) -> Iterator[Step]:
        width, most = max(len(ids) for ids, _ in jobs), max(wanted for _, wanted in jobs)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in jobs])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in jobs])
        times = []

        def note(input_ids, scores):  # called with each step's logits
            times.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=most, logits_processor=[note])
        for step, when in enumerate(times, 1):
            yield dict.fromkeys(range(len(jobs)), step), when

    return run


def load_generate_batch(request: dict) -> Loaded:
    """Load the continuous batching behind `generate_batch`, with sizes suited to a CPU."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, version = load_transformers(request)
    page_size, num_blocks = 32, 640
    config = ContinuousBatchingConfig(page_size=page_size, num_blocks=num_blocks, max_batch_tokens=1024)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(jobs: Jobs) -> Iterator[Step]:
        done = 0
        with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
            names = {}
            for i, (ids, wanted) in enumerate(jobs):
                names[manager.add_request(ids, max_new_tokens=wanted, eos_token_id=-1, streaming=True)] = i
            while done < len(jobs):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread ended before all answers were complete")
                if result is not None and result.generated_tokens:
                    done += result.is_finished()
                    yield {names[result.request_id]: len(result.generated_tokens)}, None

    return version, num_blocks * page_size * kv_bytes_per_token(model), run


def kv_bytes_per_token(model) -> int:
    """Return the bytes of one token's K and V in all layers of a transformers model."""
    config = model.config
    return 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * model.dtype.itemsize


def load_vllm(request: dict) -> Loaded:
    """Load vLLM's CPU build: compiled, prefix cache on, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=str(POOL_BYTES >> 30), VLLM_NO_USAGE_STATS="1"
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # pyright: ignore[reportMissingImports]  (in an environment of its own)

    engine = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=BATCH_TOKENS,
        enable_prefix_caching=True,
    ).llm_engine
    params = dict(temperature=0, ignore_eos=True, detokenize=False)

    def run(jobs: Jobs) -> Iterator[Step]:
        engine.reset_prefix_cache()
        for i, (ids, wanted) in enumerate(jobs):
            engine.add_request(str(i), {"prompt_token_ids": ids}, vllm.SamplingParams(max_tokens=wanted, **params))
        while engine.has_unfinished_requests():
            yield {int(out.request_id): len(out.outputs[0].token_ids) for out in engine.step()}, None

    return vllm.__version__, POOL_BYTES, run


ENGINES = {
    "ours": load_ours,
    "ours plain": load_ours,
    "ours without a compiler": load_ours,
    "transformers generate": load_padded,
    "transformers generate_batch": load_generate_batch,
    "vllm": load_vllm,
}

# ---------------------------------------------------------------- the loop


def measured(run: Run, jobs: Jobs) -> dict[str, float]:
    """Run the jobs and return the Watch's figures."""
    watch = Watch(jobs)
    for counts, at in run(jobs):
        watch.note(counts)
        if at is not None and watch.all_began == watch.now:
            watch.all_began = at
    return watch.figures()


def peak_bytes() -> int:
    """Return this process's peak memory in bytes; 0 if the system does not report it."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def answer(request: dict, state: dict) -> dict:
    """Carry out one request."""
    if request["do"] == "load":
        import torch

        torch.set_num_threads(request["threads"])
        version, pool_bytes, state["run"] = ENGINES[request["engine"]](request)
        return {"version": version, "pool_bytes": pool_bytes}
    if request["do"] == "run":
        return measured(state["run"], request["jobs"])
    return {"peak_bytes": peak_bytes()}


def main() -> None:
    """Answer requests until told to quit or until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an engine's own output goes to stderr
    state: dict = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            said = answer(request, state)
        except Exception as error:  # an engine may raise anything; the client decides what to do
            lines = str(error).strip().splitlines() or [""]
            said = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
        if request["do"] == "quit":
            break
    answers.close()
    os._exit(0)  # an engine's threads or children might keep the process alive


if __name__ == "__main__":
    main()

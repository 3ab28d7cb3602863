"""Course machinery. Ways to run the same jobs: this course's engine, two modes of transformers, vLLM.

A way opens an engine's cache and yields a function that runs jobs which arrive together; further calls reuse what the
cache still holds. torch and the engines are imported late: this also runs under Pythons that lack some of them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

PAGE = 32  # tokens in a block of `generate_batch`
Jobs = list[tuple[list[int], int]]  # prompts and numbers of tokens wanted; jobs arrive together


class Step(NamedTuple):
    """The end of a step: the time, the tokens so far of the jobs that advanced, and the prompt tokens computed."""

    when: float
    tokens: dict[int, list[int]]
    prefill_tokens: int = 0


Wave = Callable[[Jobs], Iterator[Step]]
Way = Callable[[], AbstractContextManager[Wave]]


class Watch:
    """Observes jobs that arrive together. Decode is timed from the moment when every job has its first token.

    answers: the tokens of each job. first_tokens: seconds to the first token of each job that has one.
    """

    def __init__(self, jobs: Jobs) -> None:
        self.wanted = [wanted for _, wanted in jobs]
        self.answers: list[list[int]] = [[] for _ in jobs]
        self.first_tokens: list[float] = []
        self.prefill_tokens = self.tokens_before = 0
        self.begun = self.now = self.all_began = time.perf_counter()

    def note(self, step: Step) -> None:
        """Record the end of a step."""
        self.now = step.when
        self.prefill_tokens += step.prefill_tokens
        for job, tokens in step.tokens.items():
            if tokens and not self.answers[job]:
                self.first_tokens.append(self.now - self.begun)
            self.answers[job] = tokens[: self.wanted[job]]
        if not self.tokens_before and all(self.answers):
            self.all_began, self.tokens_before = self.now, sum(map(len, self.answers))

    def figures(self) -> dict[str, float]:
        """Return the total seconds, and the tokens and seconds of decode alone."""
        if list(map(len, self.answers)) != self.wanted:
            raise RuntimeError(f"{sum(self.wanted)} tokens were wanted and {sum(map(len, self.answers))} came")
        return {
            "seconds": self.now - self.begun,
            "decode_tokens": sum(self.wanted) - self.tokens_before,
            "decode_seconds": self.now - self.all_began,
        }


def watch(way: Way, waves: Iterable[Jobs]) -> list[Watch]:
    """Run waves of jobs, each once the previous one is answered, from an empty cache. Return a Watch for each."""
    found = []
    with way() as run:
        for jobs in waves:
            found.append(Watch(jobs))
            for step in run(jobs):
                found[-1].note(step)
    return found


def ours(engine) -> Way:
    """Return the way of this course's engine."""
    from mini_engine.engine.sampling_params import SamplingParams

    def run(jobs: Jobs) -> Iterator[Step]:
        params = [SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True) for _, wanted in jobs]
        requests = [engine.add_request(str(i), ids, params[i]) for i, (ids, _) in enumerate(jobs)]
        while engine.has_unfinished:
            result = engine.step()
            tokens = {int(name): requests[int(name)].output_ids for name in result.new_tokens}
            yield Step(time.perf_counter(), tokens, result.stats.prefill_tokens)

    @contextmanager
    def way() -> Iterator[Wave]:
        engine.scheduler.manager.coordinator.clear()
        yield run

    return way


# ---------------------------------------------------------------- transformers


def load_hf(directory, dtype: str, device: str = "cpu"):
    """Return the model in transformers, silent, greedy and without end tokens."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.eval().to(device)  # type: ignore[arg-type]  (its stub takes the class for the model)


def hf_step(model, ids, cache=None, **options) -> tuple[Any, Any]:
    """Run one forward pass of a model in transformers. Return its logits and its cache.

    The cache is an argument of the name `cache` since 5.24, and was `past_key_values` before.
    """
    import transformers

    is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    out = model(ids, **{"cache" if is_new else "past_key_values": cache}, use_cache=True, **options)
    return out[0], out[1]


def padded(model) -> Way:
    """Return the way of `generate`: a batch, padded on the left, as many steps as the longest answer has tokens."""
    import torch

    def run(jobs: Jobs) -> Iterator[Step]:
        width, most = max(len(ids) for ids, _ in jobs), max(wanted for _, wanted in jobs)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in jobs], device=model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in jobs], device=model.device)
        times = []

        def note(input_ids, scores):  # called with each step's logits
            times.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=most, logits_processor=[note])
        answers = [row[width:].tolist() for row in out]
        for count, when in enumerate(times, 1):
            tokens = {job: answer[:count] for job, answer in enumerate(answers)}
            yield Step(when, tokens, ids.numel() if count == 1 else 0)

    @contextmanager
    def way() -> Iterator[Wave]:
        yield run

    return way


def continuous(model, num_blocks: int) -> Way:
    """Return the way of `generate_batch`, with at least `num_blocks` blocks of PAGE tokens.

    transformers' own defaults size its cache for a GPU; on two cores these sizes are several times faster. It does not
    report the number of prompt tokens it computed.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=max(128, num_blocks), max_batch_tokens=1024)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    @contextmanager
    def way() -> Iterator[Wave]:
        with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
            yield lambda jobs: stream(manager, jobs)

    return way


def stream(manager: Any, jobs: Jobs) -> Iterator[Step]:
    """Run jobs in a manager of `generate_batch`."""
    options = {"eos_token_id": -1, "streaming": True}
    names = {manager.add_request(ids, max_new_tokens=wanted, **options): i for i, (ids, wanted) in enumerate(jobs)}
    done = 0
    while done < len(jobs):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("its thread ended before all answers were complete")
        if result is not None and result.generated_tokens:
            done += result.is_finished()
            yield Step(time.perf_counter(), {names[result.request_id]: list(result.generated_tokens)})


# ---------------------------------------------------------------- vLLM


def vllm(engine) -> Way:
    """Return the way of vLLM's engine."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]  (in an environment of its own)

    params = dict(temperature=0, ignore_eos=True, detokenize=False)

    def run(jobs: Jobs) -> Iterator[Step]:
        for i, (ids, wanted) in enumerate(jobs):
            engine.add_request(str(i), {"prompt_token_ids": ids}, SamplingParams(max_tokens=wanted, **params))
        while engine.has_unfinished_requests():
            tokens = {int(out.request_id): list(out.outputs[0].token_ids) for out in engine.step()}
            yield Step(time.perf_counter(), tokens)

    @contextmanager
    def way() -> Iterator[Wave]:
        engine.reset_prefix_cache()
        yield run

    return way

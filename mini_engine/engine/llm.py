"""Lesson 5. Offline use: all prompts at once, all answers at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.engine.engine import Engine
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampler import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.stats import Summary
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.weights import load_model


@dataclass(frozen=True)
class Completion:
    """A prompt's answer. With finish_reason "error", `error` says why and token_ids holds what there was till then."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @classmethod
    def of(cls, request: Request) -> "Completion":
        """What a finished request comes to."""
        return cls(
            request.prompt_ids,
            request.output_ids,
            request.finish_reason,
            request.error,
            request.logprobs if request.params.logprobs is not None else None,
            request.num_cached_tokens,
            request.num_preemptions,
        )


class LLM:
    """A model and an engine for it. `LLM("path/to/checkpoint").generate([[1, 2, 3]], SamplingParams(max_tokens=8))`

    Args:
        model: a loaded model, or a directory or hub id to load one from.
        options: go to `Engine.for_model`: kv_bytes, num_blocks, block_size, kernel, scheduler_config.
    """

    def __init__(self, model: Qwen3ForCausalLM | str | Path, **options: Any) -> None:
        if not isinstance(model, Qwen3ForCausalLM):
            model = load_model(model)
        self.engine = Engine.for_model(model, **options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = True,
    ) -> list[Completion]:
        """Answer every prompt; one that cannot be run gets its error, and the others run.

        Args:
            prompts: token ids.
            params: for all, or one for each prompt.
            progress: show a bar on a terminal, and one line of figures at the end, both on stderr.

        Raises:
            UserError: there are not as many params as prompts; nothing has run.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and {len(each)} params; give one for all, or one for each prompt")
        with self._requests(prompts, each) as jobs, progress_bar(len(prompts), progress) as show:
            summary = Summary()
            unfinished = {job.id for job in jobs if isinstance(job, Request)}
            while unfinished and self.engine.has_unfinished:
                result = self.engine.step()
                summary.add_step(result.stats)
                for request in result.finished:
                    if request.id in unfinished:
                        unfinished.remove(request.id)
                        summary.add_finished(request)
                show(len(prompts) - len(unfinished), summary)
            return [Completion.of(job) if isinstance(job, Request) else job for job in jobs]

    @contextmanager
    def _requests(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[list[Request | Completion]]:
        """The engine's request for each prompt, or the error it got. None stays behind, however this ends."""
        jobs: list[Request | Completion] = []
        try:
            for i, (prompt_ids, wanted) in enumerate(zip(prompts, params, strict=True)):
                try:
                    jobs.append(self.engine.add_request(f"prompt-{i}", prompt_ids, wanted))
                except UserError as error:
                    jobs.append(Completion(prompt_ids, [], FinishReason.ERROR, str(error)))
            yield jobs
        finally:
            for job in jobs:
                if isinstance(job, Request):
                    self.engine.abort(job.id)


@contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Any]:
    """A function `show(done, summary)`; the last summary is printed at the end."""
    if not wanted:
        yield lambda done, summary: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, last = Console(stderr=True, highlight=False), []
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total)

        def show(done: int, summary: Summary) -> None:
            last[:] = [summary]
            bar.update(task, completed=done, description=f"{summary.num_new_tokens} tokens")

        yield show
    for summary in last:
        console.print(f"{total} prompts: {summary}", markup=False, soft_wrap=True)

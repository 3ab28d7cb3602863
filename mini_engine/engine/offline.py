"""Lesson 5. Offline use: submit all prompts at once, return all answers at the end. No tokenizer is needed."""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Ending, FinishReason, Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.stats import Summary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    prompt_token_ids, token_ids: prompt and answer. text: the answer as text, without its stop string; "" if the engine
        has no tokenizer.
    finish_reason: "stop", "length", "grammar" or "error"; after the last two, `error` says why and token_ids has the
        tokens so far.
    logprobs: one entry for each token of the answer, or None unless the parameters ask for them.
    prompt_logprobs: the same for the prompt's tokens from the second on.
    num_cached_tokens: tokens of the prompt that had KV already when it was admitted.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @classmethod
    def of(cls, request: Request, text: str) -> "Completion":
        """Build the completion of a finished request."""
        return cls(
            request.prompt_ids,
            request.output_ids,
            text,
            request.finish_reason,
            request.error,
            request.logprobs if request.params.logprobs is not None else None,
            request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            request.num_cached_tokens,
            request.num_preemptions,
        )


class Reader(Protocol):
    """Follows one request while it is answered. `text` is the answer's text so far."""

    text: str

    def read(self) -> Ending:
        """Read the tokens added since the last call. Return why the answer ends here, if it does."""
        ...


class NoText:
    """The reader of an engine without a tokenizer.

    Raises:
        UserError: the request has stop strings, which can only be found in text.
    """

    text = ""

    def __init__(self, request: Request) -> None:
        if request.params.stop:
            raise UserError(
                f"stop is {shown(request.params.stop)}, but this engine produces no text; use stop_token_ids or LLM",
                param="stop",
            )
        self.request = request

    def read(self) -> Ending:
        """Return an ending only where the grammar ends the answer."""
        return self.request.ending(stopped=False)


def generate_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    progress: bool = True,
    reader: Callable[[Request], Reader] = NoText,
    sessions: str | Sequence[str | None] | None = None,
) -> list[Completion]:
    """Answer all prompts; return the answers in the same order. An invalid prompt gets an error; the others run.

    Args:
        prompts: token ids.
        params: one SamplingParams for all prompts, or one for each.
        progress: show a progress bar (on a terminal) and a summary line at the end, both on stderr.
        reader: creates the Reader for a request.
        sessions: the conversation that all prompts are turns of, or one for each.

    Raises:
        UserError: `params` or `sessions` has the wrong type or length; nothing has run.
    """
    each = params_for(prompts, params), sessions_for(prompts, sessions)
    with _submitted(engine, prompts, *each) as jobs, progress_bar(len(prompts), progress) as show:
        readers = {job.id: reader(job) for job in jobs if isinstance(job, Request)}
        unfinished = {job.id: job for job in jobs if isinstance(job, Request)}
        summary = Summary()
        while unfinished and engine.has_unfinished:
            result = engine.step()
            summary.add_step(result.stats)
            for request_id in unfinished.keys() & {*result.new_tokens, *(request.id for request in result.finished)}:
                engine.conclude(unfinished[request_id], _read(readers[request_id], request_id))
                if unfinished[request_id].is_finished:
                    summary.add_finished(unfinished.pop(request_id))
            show(len(prompts) - len(unfinished), summary)
        return [Completion.of(job, readers[job.id].text) if isinstance(job, Request) else job for job in jobs]


def _read(reader: Reader, request_id: str) -> Ending:
    """Read one answer. If that fails, this answer ends with an error, and the others go on."""
    try:
        return reader.read()
    except NotImplementedError:  # an unimplemented task
        raise
    except Exception as error:
        log.exception("request %s ends with an error: its answer cannot be read", request_id)
        return Ending(FinishReason.ERROR, f"{type(error).__name__}: {error}")


def params_for(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    """Return one SamplingParams for each prompt. Raises UserError if `params` has the wrong type or length."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if isinstance(each, str) or not isinstance(each, Sequence) or not all(isinstance(p, SamplingParams) for p in each):
        raise UserError(
            f"params is {shown(params)}; give SamplingParams, or a list with one for each prompt", param="params"
        )
    if len(each) != len(prompts):
        raise UserError(
            f"{len(prompts)} prompts and {len(each)} params; give one for all, or one for each prompt", param="params"
        )
    return each


def sessions_for(prompts: Sequence[object], sessions: str | Sequence[str | None] | None) -> Sequence[str | None]:
    """Return a session for each prompt, or None. Raises UserError if `sessions` has the wrong type or length."""
    each = [sessions] * len(prompts) if isinstance(sessions, str | None) else sessions
    if not isinstance(each, Sequence) or not all(isinstance(name, str | None) and name != "" for name in each):
        what = "give a text that names the conversation, or a list with one for each prompt"
        raise UserError(f"session_id is {shown(sessions)}; {what}", param="session_id")
    if len(each) != len(prompts):
        what = "give one for all, or one for each prompt"
        raise UserError(f"{len(prompts)} prompts and {len(each)} session ids; {what}", param="session_id")
    return each


@contextmanager
def _submitted(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    sessions: Sequence[Hashable],
) -> Iterator[list[Request | Completion]]:
    """Yield the engine's request for each prompt, or its error. On exit, abort the unfinished requests."""
    jobs: list[Request | Completion] = []
    try:
        for i, (prompt_ids, wanted, session) in enumerate(zip(prompts, params, sessions, strict=True)):
            try:
                jobs.append(engine.add_request(f"prompt-{i}", prompt_ids, wanted, session=session))
            except NotImplementedError:  # an unimplemented task
                raise
            except Exception as error:  # only this prompt's; a grammar may raise anything
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                ids = list(prompt_ids) if isinstance(prompt_ids, Sequence) else []
                jobs.append(Completion(ids, [], finish_reason=FinishReason.ERROR, error=why))
        yield jobs
    finally:
        for job in jobs:
            if isinstance(job, Request):
                engine.abort(job.id)


@contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Callable[[int, Summary], None]]:
    """Yield a function `show(done, summary)`. Prints the last summary at the end."""
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

"""Lesson 6. `LLM`: text, token ids or conversations in, answers out, whole or as a stream.

llm = LLM()                                     # the pocket model; or a checkpoint directory, or a hub id
llm.generate("The capital of France is", SamplingParams(max_tokens=20))[0].text
"""

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.engine.answer import AnswerReader, TextDelta, WholeAnswer
from mini_engine.engine.engine import Engine
from mini_engine.engine.offline import Completion, generate_all, sessions_for
from mini_engine.engine.request import Ending, Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.model.causal_lm import CausalLM
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.no_tokenizer import NoTokenizer
from mini_engine.text.prompts import (
    Message,
    Prompt,
    checked_ids,
    checked_messages,
    checked_tools,
    is_conversation,
    is_sequence,
    listed,
)
from mini_engine.text.tokenizer import TOKENIZER_FILE, Tokenizer

Given = ParamSpec("Given")
Result = TypeVar("Result")


def taking_turns(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """Let one thread at a time run a method that uses the engine or the tokenizer: neither is thread-safe."""

    @functools.wraps(method)
    def taken(self: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with self.turn:
            return method(self, *args, **kwargs)

    return taken


class LLM:
    """A model, its tokenizer and an engine. `with LLM() as llm:` frees all three at the end.

    Threads may share it: their calls take turns. To have many prompts batched together, give them in one call.

    Args:
        model: a checkpoint directory, a hub id such as "Qwen/Qwen3-0.6B", "pocket-hybrid" (lesson 11),
            "pocket-windows" (lesson 15) or "pocket-latent" (lesson 16), or a loaded model; None is the pocket model.
        tokenizer: for a loaded model. A checkpoint has its own; without one, it takes and gives only token ids.
        dtype, device: as in `loading.load`; "auto" is float32 on the CPU and bfloat16 on a GPU.
            tensor_parallel_size above 1 (lesson 18) and prefill_workers (lesson 19) start processes, which end with the
            LLM; a script that asks for them belongs under `if __name__ == "__main__":`.
        config: the engine's options; or give the fields of `EngineConfig` by name.

    Raises:
        UserError: the checkpoint or an option cannot be used; the sentence says why.
    """

    def __init__(
        self,
        model: str | Path | CausalLM | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        from mini_engine.assembly import build  # the composition root, above all lessons; `for_engine` does without it
        from mini_engine.assembly.loading import reader_of

        if config is not None and options:
            raise UserError(
                f"{next(iter(options))} is given beside config; put it into the EngineConfig", param="config"
            )
        config = config or EngineConfig.of(options)
        if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
            raise UserError(f"tokenizer is {shown(tokenizer)}; give a Tokenizer", param="tokenizer")
        if isinstance(model, CausalLM):
            check_loaded(model, dtype, device, config)
            if tokenizer is None:
                raise UserError("a loaded model needs its tokenizer; give LLM(model, tokenizer)", param="tokenizer")
            self._begin(build.build_engine(model, config), tokenizer)
            return
        place = resolve_checkpoint(POCKET_DIR if model is None else model)  # once: a hub id is asked for
        reader_of(place).shape(place)  # before the tokenizer: an unsupported model is not reported as lacking one
        tokenizer = tokenizer or tokenizer_of(place)
        self._begin(build.open_engine(place, config, dtype, device), tokenizer)
        tokenizer.warn_of_lost_end(self.engine.config.eos_token_ids)

    @classmethod
    def for_engine(cls, engine: Engine, tokenizer: Tokenizer) -> "LLM":
        """Return an LLM over an engine that was built by hand."""
        llm = cls.__new__(cls)
        llm._begin(engine, tokenizer)
        return llm

    def _begin(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine: Engine | None = engine
        self.turn = threading.RLock()
        self.tokenizer = tokenizer
        self._stream_ids = (f"stream-{number}" for number in itertools.count())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @taking_turns
    def close(self) -> None:
        """Abort requests, release model and pool, and end other ranks, even if one of them fails. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with ExitStack() as parts:  # callbacks run in reverse order
                parts.callback(engine.runner.close)
                parts.callback(engine.scheduler.manager.coordinator.close)
                for request_id in list(engine.scheduler.requests):
                    engine.abort(request_id)

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError once the LLM is closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._engine

    @taking_turns
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        *,
        session_id: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Answer one prompt or many, batched together. Returns a completion for each, in their order.

        A prompt that the model or the pool cannot take ends with finish_reason "error"; the others run.

        Args:
            prompts: text or token ids, or a list of these.
            params: for all prompts, or one for each. None is `get_default_sampling_params()`: temperature 1, 16 tokens
                and whatever the checkpoint suggests, as in vLLM. Parameters that are given are used as they are.
            progress: show a progress bar on a terminal and one line of figures at the end, both on stderr.
            session_id: names the conversation that the prompts are turns of, or a list with one for each: with
                enable_sessions, what its next turn needs is evicted last (lesson 20). `close_session` ends it.

        Raises:
            UserError: a prompt, `params` or `session_id` is of the wrong type; nothing has run.
        """
        ids = [self.encode(prompt) for prompt in listed(prompts)]
        wanted = [self.default_params(len(each)) for each in ids] if params is None else params
        return generate_all(self.engine, ids, wanted, progress, lambda r: WholeAnswer(r, self.tokenizer), session_id)

    @taking_turns
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        *,
        session_id: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one conversation or many through the checkpoint's chat template; otherwise like `generate`.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations. The template sees whatever else
                a message holds, such as `reasoning_content` or `tool_calls`.
            tools: functions that the template describes to the model, in OpenAI's form.
            chat_template_kwargs: more variables for the template, such as `{"enable_thinking": False}`.
        """
        several = is_sequence(messages) and len(messages) > 0 and not is_conversation(messages)
        conversations = messages if several else [messages]
        ids = [self.encode_chat(conversation, tools, chat_template_kwargs) for conversation in conversations]
        return self.generate(ids, params, progress, session_id=session_id)

    @taking_turns
    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Stream":
        """Answer one prompt or conversation as an iterator of `TextDelta`, one for each step.

        Several streams may be read in turn; they share their steps. Leaving the loop early, or calling `close`, aborts
        the request and frees its blocks.

        Args:
            session_id: names the conversation, as in `generate`.
            tools, chat_template_kwargs: of a conversation, as in `chat`.

        Raises:
            UserError: the prompt, `params` or `session_id` is invalid; nothing has run.
        """
        if not isinstance(params, SamplingParams | None):
            raise UserError(f"params is {shown(params)}; give SamplingParams", param="params")
        is_chat = is_conversation(prompt)
        ids = self.encode_chat(prompt, tools, chat_template_kwargs) if is_chat else self.encode(prompt)
        wanted = params or self.default_params(len(ids))
        self.tokenizer.check_stops(wanted.stop)
        [session] = sessions_for([ids], session_id)
        request = self.engine.add_request(next(self._stream_ids), ids, wanted, session=session)
        return Stream(self.engine, request, AnswerReader(request, self.tokenizer), self.turn)

    @taking_turns
    def close_session(self, session_id: str) -> bool:
        """Forget a conversation: its KV stays cached and is evicted in the usual order. Return False if unknown."""
        [session] = sessions_for([()], session_id)
        return self.engine.close_session(session)

    @taking_turns
    def encode_chat(self, conversation: object, tools: object = None, variables: Any = None) -> list[int]:
        """Return the token ids of a conversation. UserError if it is not a conversation."""
        return self.tokenizer.encode_chat(checked_messages(conversation), checked_tools(tools), variables)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters for a request without any: the checkpoint's suggestions, from generation_config.json.

        Used of that file: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens. The method's name
        is vLLM's.
        """
        return SamplingParams(**self.engine.config.sampling)

    def default_params(self, num_prompt_tokens: int) -> SamplingParams:
        """Return the same for a prompt of this length, with max_tokens limited to what fits after it."""
        suggested, room = self.get_default_sampling_params(), self.engine.max_request_tokens - num_prompt_tokens
        return replace(suggested, max_tokens=max(1, min(suggested.max_tokens, room)))

    @taking_turns
    def encode(self, prompt: object) -> list[int]:
        """Return the token ids of a text to be continued; ids are returned as they are. UserError for anything else."""
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else checked_ids(prompt)


class Stream:
    """One answer as an iterator of deltas. `close` it, or leave its `with` block, to abort an unfinished answer.

    Args:
        turn: the LLM's.
    """

    def __init__(self, engine: Engine, request: Request, reader: AnswerReader, turn: threading.RLock) -> None:
        self.engine, self.request, self.reader, self.turn = engine, request, reader, turn
        self.ended = False

    def __iter__(self) -> "Stream":
        return self

    @taking_turns
    def __next__(self) -> TextDelta:
        """Run the engine until this answer has a new delta, and return it."""
        if self.ended:
            raise StopIteration
        while not self.reader.has_news:
            self.engine.step()
        try:
            delta = self.reader.next_delta()
        except BaseException:
            self.close()
            raise
        if delta.finish_reason is not None:
            self.ended = True
            self.reader.drop_unread()
            self.engine.conclude(self.request, Ending(delta.finish_reason, delta.error))  # the engine would go on
        return delta

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @taking_turns
    def close(self) -> None:
        """Abort the request unless it has finished. Idempotent."""
        self.ended = True
        self.engine.abort(self.request.id)

    def __del__(self) -> None:
        self.close()


def tokenizer_of(directory: Path) -> Tokenizer:
    """Return a checkpoint's tokenizer, or one for token ids alone if it has none."""
    return Tokenizer(directory) if (directory / TOKENIZER_FILE).is_file() else NoTokenizer(directory)


def check_loaded(model: CausalLM, dtype: str | torch.dtype, device: str | torch.device, config: EngineConfig) -> None:
    """Raise UserError if an option contradicts how the model was loaded."""
    if config.tensor_parallel_size > 1:
        raise UserError("the model is loaded already; give its directory, which every rank reads", param="model")
    if config.prefill_workers:
        raise UserError("the model is loaded already; give its directory, which prefill workers read", param="model")
    for name, asked, has in (("dtype", dtype, model.dtype), ("device", device, model.device)):
        if asked != "auto" and str(asked) not in (str(has), str(has).removeprefix("torch.")):
            raise UserError(f"{name} is {shown(asked)}, but the model is loaded with {has}; leave it out", param=name)

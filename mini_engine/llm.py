"""Lesson 6. A model that is spoken to in text: prompts and conversations in, answers out as they come."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from mini_engine.engine.answer import AnswerText, TextDelta
from mini_engine.engine.fast_parts import fast_layers, fast_runner
from mini_engine.engine.llm import LLM as OfflineLLM
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.default import default_manager
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.tokenizer import Tokenizer
from mini_engine.weights import load_model, resolve_checkpoint

Message = dict[str, str]


class LLM(OfflineLLM):
    """Lesson 5's LLM with a tokenizer. `LLM.load("path/to/checkpoint")` makes one.

    Args:
        options: for `Engine.for_model`: kv_bytes, num_blocks, block_size, kernel, scheduler_config, manager. Prefixes
            are shared unless `manager` says otherwise.
    """

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(model, **{"manager": default_manager()} | options)
        self.tokenizer = tokenizer
        self._stream_ids = (f"stream-{number}" for number in itertools.count())

    @classmethod
    def load(
        cls,
        path_or_hub_id: str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        fast: bool | None = None,
        **options: Any,
    ) -> "LLM":
        """Model and tokenizer of a checkpoint directory or hub id; UserError says what is wrong with it.

        Args:
            fast: with what lesson 9 has for this device: fast layers on the CPU, captured decode steps on a GPU. None
                takes the layers and not the capture, which is for those who ask.
        """
        directory = resolve_checkpoint(path_or_hub_id)
        model = load_model(directory, dtype, device)
        llm = cls(model if fast is False else fast_layers(model), Tokenizer(directory), **options)
        if fast:
            engine = llm.engine
            engine.runner = fast_runner(engine.runner.model, engine.runner.pool, engine.scheduler.config.max_num_seqs)
        return llm

    def encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """Token ids of a text, of a conversation (a list of messages), or as given."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            return self.tokenizer.encode_chat(prompt)
        return list(prompt)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams,
        stops: Collection[str] = (),
    ) -> Iterator[TextDelta]:
        """Answer one prompt, a delta a step. Several streams may be read in turns: their steps are shared.

        Leaving the loop early, or closing the iterator, aborts the request and frees its blocks.

        Args:
            stops: strings that end the answer and are not shown.

        Raises:
            UserError: the prompt, the params or the stops cannot be used; nothing has run.
        """
        answer = AnswerText(self.tokenizer, stops)
        request = self.engine.add_request(next(self._stream_ids), self.encode(prompt), params)
        deltas = self._deltas(request, answer)
        next(deltas)  # into its `try`: a generator that never began has no `finally`
        return deltas

    def _deltas(self, request: Request, answer: AnswerText) -> Iterator[TextDelta]:
        try:
            seen = 0
            yield TextDelta("", [])
            while True:
                while seen == len(request.output_ids) and not request.is_finished:
                    self.engine.step()
                token_ids = request.output_ids[seen:]
                seen = len(request.output_ids)
                text = ""
                for token in token_ids:
                    text += answer.push(token)
                    if answer.stop is not None:
                        self.engine.abort(request.id, FinishReason.STOP)
                        yield TextDelta(text, token_ids, FinishReason.STOP)
                        return
                if request.is_finished:
                    reason = request.finish_reason
                    text += answer.finish()
                    yield TextDelta(text, token_ids, FinishReason.STOP if answer.stop else reason, request.error)
                    return
                yield TextDelta(text, token_ids)
        finally:
            self.engine.abort(request.id)

    def answer(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams,
        stops: Collection[str] = (),
    ) -> str:
        """The whole text of `stream`.

        Raises:
            UserError: as `stream`.
            RuntimeError: the engine could not finish the answer.
        """
        with closing(self.stream(prompt, params, stops)) as deltas:
            *pieces, last = deltas
        if last.error is not None:
            raise RuntimeError(f"the engine could not finish this answer: {last.error}")
        return "".join(delta.text for delta in (*pieces, last))

"""Lesson 5. What fails in one request's own data ends that request: the others' answers are those of a lone run."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine.grammar import Anything
from mini_engine.engine.offline import NoText, generate_all
from mini_engine.engine.prompt_logprobs import take_prompt_rows
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from tests.l5.helpers import request_of
from tests.stubs import VOCAB, check_empty, stub_engine

ALL = (2**VOCAB - 1).to_bytes(VOCAB // 8, "little")


class Failing(Anything):
    """A grammar that allows every token until the answer has `after` of them; then the method `place` fails."""

    def __init__(self, place, after):
        self.place, self.after, self.taken = place, after, 0

    def matcher(self):
        if self.place == "matcher":
            raise RuntimeError("no grammar today")
        return Failing(self.place, self.after)

    def fail_at(self, place):
        if place == self.place and self.taken >= self.after:
            raise RuntimeError("the grammar is on fire")

    def mask(self):
        self.fail_at("mask")
        return bytes(VOCAB // 8) if self.place == "no token" and self.taken >= self.after else ALL

    def push(self, token_id):
        self.taken += 1
        self.fail_at("push")
        if self.place == "error" and self.taken >= self.after:
            self.error = "the form has no way on"


class FailingReader(NoText):
    """Fails once the answer has `after` tokens."""

    def __init__(self, request, after):
        super().__init__(request)
        self.after = after

    def read(self):
        if len(self.request.output_ids) >= self.after:
            raise UnicodeError("half a character")
        return super().read()


def without_numbers(engine, prompt, after):
    """Make the model return NaN for this prompt once its answer has `after` tokens."""
    run = engine.runner.run

    def broken(chunks):
        logits = run(chunks)
        for row, chunk in zip(logits, [chunk for chunk in chunks if chunk.samples], strict=True):
            if chunk.request.prompt_ids == prompt and len(chunk.request.output_ids) >= after:
                row.fill_(float("nan"))
        return logits

    engine.runner.run = broken


OWN_PLACES = {  # where a request's own data is touched, and how it ends
    "matcher": FinishReason.ERROR,
    "mask": FinishReason.ERROR,
    "push": FinishReason.GRAMMAR,
    "error": FinishReason.GRAMMAR,
    "no token": FinishReason.GRAMMAR,
    "logits": FinishReason.ERROR,
    "reader": FinishReason.ERROR,
}


@pytest.mark.parametrize("place", OWN_PLACES)
@settings(max_examples=12, deadline=None)
@given(after=st.integers(0, 5), victim=st.integers(0, 3), temperature=st.sampled_from([0, 1]), data=st.data())
def test_a_request_that_fails_ends_alone(place, after, victim, temperature, data):
    logging.disable(logging.CRITICAL)
    try:
        usable, budget = data.draw(st.integers(9, 24), "blocks"), data.draw(st.integers(4, 16), "tokens in a step")
        prompts = [[(i * 7 + n) % (VOCAB - 1) + 1 for i in range(n)] for n in (3, 11, 6, 17)]
        asked = [SamplingParams(temperature, max_tokens=9, seed=i, ignore_eos=True) for i in range(4)]
        alone = [generate_all(stub_engine(), [p], a, progress=False)[0] for p, a in zip(prompts, asked, strict=True)]

        engine = stub_engine(usable, max_num_seqs=4, max_num_batched_tokens=budget)
        asked[victim] = SamplingParams(
            temperature, max_tokens=9, seed=victim, ignore_eos=True, grammar=Failing(place, after)
        )
        if place == "logits":
            without_numbers(engine, prompts[victim], after)

        def reader(request):
            is_victim = place == "reader" and request.prompt_ids == prompts[victim]
            return FailingReader(request, after) if is_victim else NoText(request)

        found = generate_all(engine, prompts, asked, progress=False, reader=reader)
        for i, (one, lone) in enumerate(zip(found, alone, strict=True)):
            if i != victim:
                assert (one.token_ids, one.finish_reason) == (lone.token_ids, "length"), f"{i} has paid for {victim}"
        failed, begun = found[victim], alone[victim].token_ids[: len(found[victim].token_ids)]
        assert (failed.finish_reason, failed.token_ids) == (OWN_PLACES[place], begun) and failed.error
        check_empty(engine)
    finally:
        logging.disable(logging.NOTSET)


def test_a_prompts_log_probabilities_that_fail_end_its_request_alone():
    good, bad = (request_of(3, name=name) for name in ("good", "bad"))
    for request in (good, bad):
        object.__setattr__(request, "params", SamplingParams(prompt_logprobs=1))
    bad.prompt_ids[1] = VOCAB + 7  # no row of the logits has it
    failed = []
    chunks = [Chunk(request, 0, 3, [1]) for request in (bad, good)]
    rows = take_prompt_rows(torch.zeros(6, VOCAB), chunks, lambda request, error: failed.append(request))
    assert failed == [bad] and len(rows) == 2
    assert [type(one) for one in good.prompt_logprobs] == [TokenLogprobs] * 2

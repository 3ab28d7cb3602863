"""Lesson 9. Fast layers are the default on a CPU, can be turned off, and change no token."""

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import UserError
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.model.decoder import Decoder
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer

PROMPTS = ["The capital of France is", "A cow says"]


def llm(**options):
    engine = build_engine(load_model(POCKET_DIR), num_blocks=64, **options)
    return LLM.for_engine(engine, Tokenizer.load(POCKET_DIR))


def answers(llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    return [done.token_ids for done in llm.generate(PROMPTS, params, progress=False)]


@pytest.fixture(scope="module")
def reference():
    return llm(backend="reference")


def test_the_reference_backend_is_lesson_0_s_layers(reference):
    assert isinstance(reference.engine.runner.model.model, Decoder)


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}])
def test_on_the_cpu_fast_layers_are_the_default_and_change_no_token(reference, options):
    fast = llm(**options)
    assert not isinstance(fast.engine.runner.model.model, Decoder)
    assert type(fast.engine.runner) is ModelRunner
    assert answers(fast) == answers(reference)


def test_an_unknown_backend_is_rejected_in_one_sentence():
    with pytest.raises(UserError) as caught:
        llm(backend="fast")
    assert caught.value.param == "backend" and "reference" in str(caught.value), "the error must list the backends"

"""Lesson 9. Who gets fast layers without asking, who by asking, and that nobody's tokens change."""

import pytest

from mini_engine.cpu.model import FastQwen3ForCausalLM
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.llm import LLM
from mini_engine.pocket import POCKET_DIR

PROMPTS = ["The capital of France is", "A cow says"]


def answers(llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    return [done.token_ids for done in llm.generate([llm.encode(text) for text in PROMPTS], params)]


@pytest.fixture(scope="module")
def plain():
    return LLM.load(POCKET_DIR, fast=False)


def test_without_fast_the_model_is_the_notebook_s(plain):
    assert not isinstance(plain.engine.runner.model, FastQwen3ForCausalLM)


@pytest.mark.parametrize("fast", [None, True])
def test_on_the_cpu_fast_layers_are_the_default_and_change_no_token(plain, fast):
    llm = LLM.load(POCKET_DIR, fast=fast)
    assert isinstance(llm.engine.runner.model, FastQwen3ForCausalLM)
    assert type(llm.engine.runner) is ModelRunner, "there is nothing to capture on a CPU"
    assert answers(llm) == answers(plain)

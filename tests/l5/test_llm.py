"""Lesson 5. LLM.generate: answers in the prompts' order, an error for one that cannot run, nothing left behind."""

import pytest

from mini_engine.engine.llm import LLM, Completion
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.errors import UserError
from tests.l5.helpers import check_empty
from tests.support import both, checkpoint, hf_greedy, some_ids

FAMILY = "two, tied, wide heads"


def llm(**options):
    return LLM(both(FAMILY)[0], **{"num_blocks": 12, "kernel": "torch"} | options)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_answers_come_in_the_order_of_the_prompts():
    ours, hf = both(FAMILY)
    prompts = [some_ids(n, ours.config.vocab_size, seed=n) for n in (40, 3, 17, 1)]
    engine = llm()
    got = engine.generate(prompts, [greedy(n) for n in (9, 2, 20, 1)], progress=False)
    assert [c.token_ids for c in got] == [hf_greedy(hf, p, n) for p, n in zip(prompts, (9, 2, 20, 1), strict=True)]
    assert [c.prompt_ids for c in got] == prompts and {c.finish_reason for c in got} == {"length"}
    check_empty(engine.engine)


def test_a_prompt_that_cannot_run_gets_its_error_and_its_neighbours_run():
    engine = llm()
    got = engine.generate([[1, 2], [], [3] * 500, [4]], greedy(3), progress=False)
    assert [c.finish_reason for c in got] == ["length", "error", "error", "length"]
    assert got[1] == Completion([], [], "error", "the prompt is empty; give at least one token")
    assert "the whole pool has 11" in got[2].error and len(got[3].token_ids) == 3
    check_empty(engine.engine)


def test_a_prompt_of_another_kind_gets_its_error_and_its_neighbours_run():
    engine = llm()
    got = engine.generate([[1, 2], "one", [1, 2.5], 7], greedy(3), progress=False)
    assert [c.finish_reason for c in got] == ["length", "error", "error", "error"]
    assert "type str" in got[1].error and "2.5 is not in the vocabulary" in got[2].error and "type int" in got[3].error
    check_empty(engine.engine)


def test_logprobs_come_if_asked_for():
    plain, told = llm().generate(
        [[1, 2], [1, 2]], [greedy(4), SamplingParams(temperature=0, max_tokens=4, logprobs=2)], progress=False
    )
    assert plain.logprobs is None and len(told.logprobs) == 4 and told.token_ids == plain.token_ids
    assert [top[0][0] for _, top in told.logprobs] == told.token_ids, "greedy takes the most likely token"


def test_as_many_params_as_prompts():
    with pytest.raises(UserError, match="2 prompts and 3 params"):
        llm().generate([[1], [2]], [greedy(1)] * 3)


def test_an_interrupted_run_leaves_nothing_behind():
    engine, ran = llm(), []
    model = engine.engine.runner.model

    def press_ctrl_c(*_):
        ran.append(1)
        if len(ran) == 3:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(press_ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2], [3]], greedy(9), progress=False)
    finally:
        handle.remove()
    check_empty(engine.engine)
    assert engine.generate([[1, 2]], greedy(2), progress=False)[0].finish_reason == "length"


def test_no_prompts_no_answers():
    assert llm().generate([], greedy(1), progress=False) == []


def test_a_line_of_figures_at_the_end(capsys):
    LLM(checkpoint(FAMILY), num_blocks=12, kernel="torch").generate([[1, 2], [3]], greedy(4))
    out, err = capsys.readouterr()
    assert out == "" and "2 prompts: 8 new tokens" in err and "2 length" in err and "0 preemptions" in err

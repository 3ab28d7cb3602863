"""Lesson 5. generate_all: answers in the order of the prompts, errors for invalid ones, nothing left behind."""

import pytest

from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.offline import Completion, generate_all
from mini_engine.engine.sampling_params import SamplingParams
from tests.stubs import check_empty
from tests.support import both, hf_greedy, refused, some_ids

FAMILY = "two, tied, wide heads"


def make_engine():
    return Engine.for_model(both(FAMILY)[0], num_blocks=12, kernel="torch")


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_answers_come_in_the_order_of_the_prompts():
    ours, hf = both(FAMILY)
    prompts = [some_ids(n, ours.config.vocab_size, seed=n) for n in (40, 3, 17, 1)]
    engine = make_engine()
    got = generate_all(engine, prompts, [greedy(n) for n in (9, 2, 20, 1)], progress=False)
    assert [c.token_ids for c in got] == [hf_greedy(hf, p, n) for p, n in zip(prompts, (9, 2, 20, 1), strict=True)]
    assert [c.prompt_token_ids for c in got] == prompts and {c.finish_reason for c in got} == {"length"}
    check_empty(engine)


def test_an_invalid_prompt_gets_its_error_and_others_run():
    engine = make_engine()
    got = generate_all(engine, [[1, 2], [], [3] * 500, [4]], greedy(3), progress=False)
    assert [c.finish_reason for c in got] == ["length", "error", "error", "length"]
    assert got[1] == Completion([], [], finish_reason="error", error=got[1].error) and got[1].error
    assert "11" in got[2].error and len(got[3].token_ids) == 3
    check_empty(engine)


def test_a_prompt_of_the_wrong_type_gets_its_error_and_others_run():
    engine = make_engine()
    got = generate_all(engine, [[1, 2], "one", [1, 2.5], 7], greedy(3), progress=False)
    assert [c.finish_reason for c in got] == ["length", "error", "error", "error"]
    assert "str" in got[1].error and "2.5" in got[2].error and "int" in got[3].error
    check_empty(engine)


def test_the_number_of_params_must_match_the_prompts():
    with refused(UserError, "2 3"):
        generate_all(make_engine(), [[1], [2]], [greedy(1)] * 3)


@pytest.mark.parametrize("params", [None, [None], "greedy", 3, [greedy(1), None]])
def test_params_of_the_wrong_type_are_refused_before_anything_runs(params):
    engine = make_engine()
    with pytest.raises(UserError) as caught:
        generate_all(engine, [[1]], params, progress=False)
    assert caught.value.param == "params"
    check_empty(engine)


def test_stop_strings_are_refused_without_text():
    engine = make_engine()
    with pytest.raises(UserError) as caught:
        generate_all(engine, [[1], [2]], SamplingParams(stop="x"), progress=False)
    assert caught.value.param == "stop"
    check_empty(engine)


def test_an_interrupted_run_leaves_nothing_behind():
    engine, ran = make_engine(), []
    model = engine.runner.model

    def press_ctrl_c(*_):
        ran.append(1)
        if len(ran) == 3:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(press_ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate_all(engine, [[1, 2], [3]], greedy(9), progress=False)
    finally:
        handle.remove()
    check_empty(engine)
    assert generate_all(engine, [[1, 2]], greedy(2), progress=False)[0].finish_reason == "length"


def test_no_prompts_give_no_answers():
    assert generate_all(make_engine(), [], greedy(1), progress=False) == []


def test_a_summary_line_is_printed_at_the_end(capsys):
    generate_all(make_engine(), [[1, 2], [3]], greedy(4))
    out, err = capsys.readouterr()
    assert out == "" and "2 prompts: 8 new tokens" in err and "2 length" in err and "0 preemptions" in err

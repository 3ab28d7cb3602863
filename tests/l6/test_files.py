"""Lesson 6. What the files beside the weights say of a checkpoint's text: how answers end, and how they are sampled."""

import json

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.__main__ import main
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.generation import sampling_defaults
from mini_engine.cli.arguments import add_sampling_options, sampling_params
from mini_engine.cli.parser import OneLineParser
from mini_engine.engine.request import FinishReason
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.support import hf_greedy, refused

pytestmark = pytest.mark.reference  # about files, not about a task

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
END, OF_TEXT = 2047, 2045  # <|im_end|>, <|endoftext|>


def opened(directory) -> LLM:
    return LLM(directory, num_blocks=32, backend="reference", kernel="torch")


def greedy(max_tokens=30, **changes):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


# How answers end.


@pytest.fixture(scope="module")
def endless(written):
    """The pocket model, whose generation config does not name the end of a turn."""
    with opened(written(eos_token_id=OF_TEXT)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("file", "settings", "lines"),
    [
        ("generation_config.json", {}, 0),
        ("generation_config.json", {"eos_token_id": OF_TEXT}, 1),
        ("tokenizer_config.json", {"eos_token": "<|im_start|>"}, 1),
        ("tokenizer_config.json", {"eos_token": None}, 0),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, 0),
    ],
)
def test_a_tokenizer_s_end_that_ends_no_answer_is_worth_one_line(written, capsys, file, settings, lines):
    opened(written(file, **settings)).close()
    said = capsys.readouterr().err
    assert said.count("\n") == lines and (not lines or "eos_token" in said), said


@pytest.mark.parametrize("stop", ["<|im_end|>", "im_end", ["never", "<|im_end|>"]])
def test_a_stop_string_may_be_a_control_token(endless, stop):
    full = endless.chat(QUESTION, greedy(), progress=False)[0]
    at = full.token_ids.index(END)
    assert len(full.token_ids) > at + 1, "without it the answer goes on behind the end of the turn"
    ended = endless.chat(QUESTION, greedy(stop=stop), progress=False)[0]
    assert ended.token_ids == full.token_ids[: at + 1] and ended.finish_reason == FinishReason.STOP
    assert ended.text == endless.tokenizer.decode(full.token_ids[:at])
    deltas = list(endless.stream(QUESTION, greedy(stop=stop)))
    assert "".join(delta.text for delta in deltas) == ended.text and deltas[-1].finish_reason == FinishReason.STOP


def test_what_was_held_back_is_shown_before_a_control_token_that_stops(endless):
    full = endless.chat(QUESTION, greedy(), progress=False)[0].token_ids
    text = endless.tokenizer.decode(full[: full.index(END)])
    held = greedy(stop=[text[-3:] + "x", "<|im_end|>"])
    assert endless.chat(QUESTION, held, progress=False)[0].text == text, "the end may begin a stop string, and does not"


# How answers are sampled.

AUTHORS = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, max_new_tokens=5)
LAUGHTER = "ha ha ha ha ha"


@pytest.fixture(scope="module")
def advised(written):
    """The pocket model, whose authors say how to sample it."""
    with opened(written(**AUTHORS)) as llm:
        yield llm


def params_of(llm, call):
    """Return the parameters of the request that a call made, once it has run."""
    seen, add = [], llm.engine.add_request
    llm.engine.add_request = lambda name, ids, params, **more: seen.append(params) or add(name, ids, params, **more)
    try:
        call()
    finally:
        del llm.engine.add_request
    return seen


def test_requests_without_parameters_get_them(advised):
    wanted = SamplingParams(0.6, 20, 0.95, 0.01, 1.1, max_tokens=5)
    assert advised.get_default_sampling_params() == wanted
    calls = [
        lambda: advised.generate([LAUGHTER, "Hello"], progress=False),
        lambda: advised.chat(QUESTION, progress=False),
        lambda: list(advised.stream(LAUGHTER)),
    ]
    assert [params for call in calls for params in params_of(advised, call)] == [wanted] * 4


def test_a_suggested_length_does_not_make_a_prompt_too_long(written):
    with opened(written(max_new_tokens=32_768)) as llm:
        assert llm.get_default_sampling_params().max_tokens == 32_768
        [params] = params_of(llm, lambda: llm.stream([1] * 400).close())
        assert params.max_tokens == 31 * 16 + 1 - 400, "what the pool holds, and one token whose KV nothing needs"


@pytest.mark.ci
def test_a_greedy_command_gives_hugging_face_s_tokens_with_the_file_s_penalty(written, capsys):
    from transformers import AutoModelForCausalLM

    directory = written(repetition_penalty=1.1)
    options = ["--model", str(directory), "--dtype", "float32", "--max-tokens", "12", "--json"]
    assert main(["generate", LAUGHTER, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert found["token_ids"] == hf_greedy(theirs, found["prompt_ids"], 12)
    assert found["token_ids"][:4] == [573, 11, 878, 937]


@pytest.mark.parametrize(
    ("settings", "options", "wanted"),
    [
        ({}, [], SamplingParams(0.0)),
        (AUTHORS, [], SamplingParams(0.6, 20, 0.95, 0.01, 1.1)),
        (AUTHORS, ["--temperature", "0", "--top-k", "3"], SamplingParams(0.0, 3, 0.95, 0.01, 1.1)),
    ],
)
def test_a_command_s_options_come_first_then_the_file_then_greedy(written, settings, options, wanted):
    parser = OneLineParser()
    add_sampling_options(parser, max_tokens=16)
    suggested = sampling_defaults(written(**settings))
    assert sampling_params(parser.parse_args(options), suggested) == wanted


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("temperature", -1), ("temperature", "warm"), ("temperature", float("nan")), ("top_k", 2.5), ("top_p", 1.5)),
        *(("min_p", -0.1), ("repetition_penalty", 0), ("max_new_tokens", 0)),
    ],
)
def test_a_suggestion_that_is_out_of_range_is_left_out_with_one_line(written, capsys, name, bad):
    found = sampling_defaults(written(**AUTHORS | {name: bad}))
    said = capsys.readouterr().err
    assert name.replace("new_", "") not in found and len(found) == 5 and said.count("\n") == 1 and name in said


def test_a_top_k_of_minus_one_is_off(written):
    assert sampling_defaults(written(top_k=-1)) == {"top_k": 0}


# A checkpoint without a tokenizer.


@pytest.fixture(scope="module")
def mute(written):
    """The pocket model without its tokenizer."""
    directory = written()
    for path in directory.glob("token*"):
        path.unlink()
    with opened(directory) as llm:
        yield llm


def test_ids_go_in_and_ids_come_out(mute):
    ids = Tokenizer(POCKET_DIR).encode(LAUGHTER)
    with opened(POCKET_DIR) as speaking:
        [wanted] = speaking.generate([ids], greedy(8, logprobs=2), progress=False)
    [found] = mute.generate([ids], greedy(8, logprobs=2), progress=False)
    assert (found.token_ids, found.logprobs, found.text) == (wanted.token_ids, wanted.logprobs, "")
    deltas = list(mute.stream(ids, greedy(8)))
    assert [token for delta in deltas for token in delta.token_ids] == found.token_ids


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda llm: llm.generate("Hello", greedy()), "prompt"),
        (lambda llm: llm.generate([[1, 2], "Hello"], greedy()), "prompt"),
        (lambda llm: llm.encode("Hello"), "prompt"),
        (lambda llm: llm.stream("Hello"), "prompt"),
        (lambda llm: llm.chat(QUESTION), "messages"),
        (lambda llm: llm.stream(QUESTION), "messages"),
        (lambda llm: llm.generate([[1, 2]], greedy(stop="x")), "stop"),
        (lambda llm: llm.stream([1, 2], greedy(stop="x")), "stop"),
        (lambda llm: llm.tokenizer.decode([1, 2]), "token_ids"),
    ],
)
def test_what_needs_text_is_refused_and_nothing_has_run(mute, ask, param):
    with refused(UserError, "tokenizer.json") as caught:
        ask(mute)
    assert caught.value.param == param
    assert not mute.engine.has_unfinished and mute.engine.scheduler.manager.blocks_by_state.held == 0


# A folder that is no checkpoint of ours.


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"model_type": "gpt2"}, "config.json 'gpt2'"),
        ({"model_type": "qwen3_next", "text_config": {}}, "'qwen3_next'"),
        ({"_class_name": "Pipeline"}, "config.json None"),
        (None, "config.json"),
    ],
)
@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_another_kind_of_folder_is_refused_for_what_it_is(tmp_path, capsys, config, values, tokenizer):
    for name, text in (("config.json", config and json.dumps(config)), ("tokenizer.json", tokenizer)):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
    with refused(UserError, values) as caught:
        LLM(tmp_path)
    assert main(["generate", "Hello", "--model", str(tmp_path)]) == 2
    assert str(caught.value) in capsys.readouterr().err
    assert "tokenizer" not in str(caught.value)


@pytest.mark.parametrize("option", ["model", "kv_cache_dir", "kv_cache_key_file"])
def test_an_empty_name_is_not_the_working_directory(option):
    with refused(UserError) as caught:
        LLM(**{option: ""})
    assert caught.value.param == option

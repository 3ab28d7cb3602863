"""Lesson 6. `LLM`: streams equal whole answers, prompts of every type, stop strings, and no block left behind."""

import threading

import pytest

from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.grammar import Anything
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.support import OneOf, refused

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm():
    return LLM.for_engine(Engine.for_model(load_model(POCKET_DIR), num_blocks=64), Tokenizer.load(POCKET_DIR))


@pytest.fixture(autouse=True)
def no_block_left_behind(llm):
    yield
    assert llm.engine.scheduler.manager.blocks_by_state.held == 0, "a stream left blocks behind"
    assert not llm.engine.has_unfinished


def greedy(max_tokens=20, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def answer(llm, prompt, params):
    return llm.generate(prompt, params, progress=False)[0].text


def test_the_deltas_of_a_stream_add_up_to_the_answer(llm):
    deltas = list(llm.stream(PROMPT, greedy()))
    whole = llm.generate([llm.encode(PROMPT)], greedy(), progress=False)[0]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == llm.tokenizer.decode(whole.token_ids)
    assert len(deltas) > 5, "the answer came in one piece"
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]


def close(stream):
    stream.close()


def read_and_close(stream):
    next(stream)
    stream.close()


@pytest.mark.parametrize("leave", [close, read_and_close, lambda stream: None], ids=["close", "read", "forget"])
def test_a_stream_that_is_not_read_to_its_end_is_aborted(llm, leave):
    leave(llm.stream(PROMPT, greedy()))
    assert not llm.engine.has_unfinished, "its request would be computed for no reader"
    assert llm.engine.scheduler.manager.blocks_by_state.held == 0, "close must abort the request"


def test_an_end_token_gives_the_reason_stop_and_is_not_shown(llm):
    *_, last = llm.stream([{"role": "user", "content": "What is the capital of Japan?"}], greedy(60))
    assert last.finish_reason == FinishReason.STOP
    assert last.token_ids[-1] == OneOf(*llm.engine.config.eos_token_ids) and "<|" not in last.text


@pytest.mark.parametrize("length", [1, 6])
def test_a_stop_string_is_shown_if_asked_for_and_nothing_behind_it(llm, length):
    full = answer(llm, PROMPT, greedy())
    stop = full[6 : 6 + length]
    params, shown = greedy(stop=[stop], include_stop_str_in_output=True), full[: full.index(stop)] + stop
    assert answer(llm, PROMPT, params) == shown
    assert "".join(delta.text for delta in llm.stream(PROMPT, params)) == shown


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_whole_answers_and_streams_agree_why_an_answer_ended(llm, spare):
    ids = llm.generate(PROMPT, greedy(), progress=False)[0].token_ids
    stop, length = llm.tokenizer.decode(ids[2:4]), 4  # token number 4 completes it
    params = greedy(length + spare, stop=[stop])
    whole, *_, last = llm.generate(PROMPT, params, progress=False)[0], *llm.stream(PROMPT, params)
    assert last.finish_reason == FinishReason.STOP
    assert whole.finish_reason == FinishReason.STOP, (
        "the token that completes the stop string is the last one allowed; the stop string ended the answer still"
    )
    assert len(whole.token_ids) == length


class OneWord(Anything):
    """A grammar that allows anything and is over, or broken, after three tokens."""

    def __init__(self, failure):
        self.failure, self.left = failure, 3

    def matcher(self):
        return OneWord(self.failure)

    def mask(self):
        return b"\xff" * 256

    def push(self, token_id):
        self.left -= 1
        self.is_over, self.error = self.left <= 0, self.failure if self.left <= 0 else None


@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("failure, reason", [(None, FinishReason.STOP), ("it is broken", FinishReason.GRAMMAR)])
def test_the_end_of_a_grammar_counts_before_the_limit_of_tokens(llm, spare, failure, reason):
    params = greedy(3 + spare, grammar=OneWord(failure))
    whole, *_, last = llm.generate(PROMPT, params, progress=False)[0], *llm.stream(PROMPT, params)
    assert (last.finish_reason, last.error) == (reason, failure)
    assert (whole.finish_reason, whole.error, len(whole.token_ids)) == (reason, failure, 3)


def test_streams_read_in_turn_share_steps_but_not_tokens(llm):
    prompts = [PROMPT, "Once upon a time", "Count: one, two, three,"]
    alone = [answer(llm, prompt, greedy()) for prompt in prompts]
    streams, texts = [llm.stream(prompt, greedy()) for prompt in prompts], [""] * 3
    for _ in range(20):
        for i, stream in enumerate(streams):
            delta = next(stream, None)
            texts[i] += delta.text if delta else ""
    for stream in streams:
        stream.close()
    assert texts == alone


def test_in_a_batch_a_stop_string_ends_only_its_own_answer(llm):
    full = answer(llm, PROMPT, greedy())
    stop = full[6:12]
    params = [greedy(stop=stop), greedy(stop=["never there"]), greedy(4)]
    stopped, whole, short = llm.generate([PROMPT] * 3, params, progress=False)
    assert (stopped.text, stopped.finish_reason) == (full[: full.index(stop)], FinishReason.STOP)
    assert (whole.text, whole.finish_reason) == (full, FinishReason.LENGTH), (
        "another request's stop string ended this answer"
    )
    assert full.startswith(short.text) and len(short.token_ids) == 4


def test_prompts_may_be_text_or_ids_one_or_many(llm):
    ids = llm.encode(PROMPT)
    one = llm.generate(PROMPT, greedy(5), progress=False)
    assert [c.token_ids for c in one] == [c.token_ids for c in llm.generate(ids, greedy(5), progress=False)]
    both = llm.generate([PROMPT, ids], greedy(5), progress=False)
    assert both[0] == both[1] == one[0] and both[0].prompt_token_ids == ids
    assert both[0].text == llm.tokenizer.decode(both[0].token_ids)
    assert llm.generate([], greedy(5), progress=False) == []


def test_the_default_params_are_those_of_vllm(llm):
    done = llm.generate(PROMPT, progress=False)[0]
    assert len(done.token_ids) == SamplingParams().max_tokens == 16 and SamplingParams().temperature == 1.0


@pytest.mark.parametrize(
    "prompts",
    [None, 7, 2.5, b"bytes", [PROMPT, None], [[1, 2.5]], [[1, "two"]], [[True]], {"a": 1}, [{"role": "user"}]],
)
def test_a_prompt_of_the_wrong_type_is_refused_in_one_sentence(llm, prompts):
    with refused(UserError) as caught:
        llm.generate(prompts, greedy(), progress=False)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        *(None, [], "Hi", [[]], [5], [{"content": "Hi"}], [{"role": "user"}]),
        *([{"role": "user", "content": content}] for content in (5, [5], [{"type": "text"}])),
        *([{"role": "assistant", "tool_calls": calls}] for calls in (5, [5], [{}], [{"function": 5}], "x")),
    ],
)
def test_a_malformed_conversation_is_refused_in_one_sentence(llm, messages):
    with pytest.raises(UserError) as caught:
        llm.chat(messages, greedy(), progress=False)
    assert caught.value.param == "messages"


def test_chat_answers_one_conversation_or_many(llm):
    japan, france = ([{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("Japan", "France"))
    both = llm.chat([japan, france], greedy(60), progress=False)
    assert "Tokyo" in both[0].text and "Paris" in both[1].text
    assert llm.chat(japan, greedy(60), progress=False) == both[:1], (
        "one conversation must give a list of one completion"
    )
    assert "".join(delta.text for delta in llm.stream(japan, greedy(60))) == both[0].text


@pytest.mark.parametrize("stop", [[5], [b"END"], 5])
def test_a_stop_that_is_not_text_is_refused(stop):
    with pytest.raises(UserError) as caught:
        greedy(stop=stop)
    assert caught.value.param == "stop"


@pytest.mark.parametrize("params", ["greedy", [SamplingParams()], 5])
def test_a_stream_takes_exactly_one_set_of_params(llm, params):
    with pytest.raises(UserError):
        llm.stream(PROMPT, params)


def test_an_answer_that_the_engine_cannot_finish_ends_with_its_error(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.runner, "run", lambda chunks: 1 / 0)
    done = llm.generate(PROMPT, greedy(), progress=False)[0]
    assert done.finish_reason == FinishReason.ERROR and "ZeroDivisionError" in done.error
    *_, last = llm.stream(PROMPT, greedy())
    assert last.finish_reason == FinishReason.ERROR and "ZeroDivisionError" in last.error


def test_closing_an_llm_aborts_unfinished_requests_and_later_calls_say_so():
    with LLM.for_engine(Engine.for_model(load_model(POCKET_DIR), num_blocks=64), Tokenizer.load(POCKET_DIR)) as llm:
        stream = llm.stream(PROMPT, greedy())
        next(stream)
        engine = llm.engine
    assert not engine.has_unfinished and engine.scheduler.manager.blocks_by_state.held == 0
    llm.close()
    with pytest.raises(RuntimeError):
        llm.generate(PROMPT)


@pytest.mark.reference
def test_closing_an_llm_ends_other_processes_though_a_part_fails(monkeypatch):
    llm, closed = LLM(num_blocks=20, block_size=4), []
    manager, runner = llm.engine.scheduler.manager, llm.engine.runner
    next(llm.stream("One two", greedy()))
    monkeypatch.setattr(manager.coordinator, "close", lambda: 1 / 0)
    monkeypatch.setattr(runner, "close", lambda: closed.append(True))
    with pytest.raises(ZeroDivisionError):
        llm.close()
    assert closed == [True] and not manager.tables
    llm.close()


@pytest.mark.reference
def test_a_stream_whose_text_cannot_be_made_ends(llm):
    stream = llm.stream("One two", greedy())
    stream.reader.answer.push = lambda token_id: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert stream.request.finish_reason == FinishReason.ABORT and list(stream) == []


def test_threads_that_share_an_llm_get_right_answers(llm):
    prompts = [PROMPT, "Once upon a time", "What", "The", "One two three", "He said", "In the morning", "ha ha ha"]
    conversation = [{"role": "user", "content": "What is the capital of Japan? <|im_end|>"}]
    alone = [answer(llm, prompt, greedy(5)) for prompt in prompts]
    alone_chat = llm.chat(conversation, greedy(5), progress=False)[0].text
    together, barrier = {}, threading.Barrier(len(prompts))

    def ask(index: int) -> None:
        barrier.wait()
        streamed = "".join(delta.text for delta in llm.stream(prompts[index], greedy(5)))
        whole = answer(llm, prompts[index], greedy(5))
        together[index] = whole, streamed, llm.chat(conversation, greedy(5), progress=False)[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {index: (text, text, alone_chat) for index, text in enumerate(alone)}


@pytest.mark.parametrize("prompt, values", [("", ""), ([5000], "5000"), ([1] * 9000, "8192")])
def test_a_prompt_that_cannot_run_is_refused_by_the_call(llm, prompt, values):
    with refused(UserError, values):
        llm.stream(prompt, greedy())


@pytest.mark.parametrize(
    ("more", "param"),
    [({"tools": 5}, "tools"), ({"tools": ["f"]}, "tools"), ({"chat_template_kwargs": 5}, "chat_template_kwargs")],
)
def test_what_no_template_takes_is_refused(llm, more, param):
    for ask in (llm.chat, llm.stream):
        with refused(UserError) as caught:
            ask([{"role": "user", "content": "Hi"}], **more)
        assert caught.value.param == param


def test_a_conversation_may_have_tools_calls_and_results(llm):
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (done,) = llm.chat(messages, greedy(1), progress=False, tools=tools)
    text = llm.tokenizer.text_of(done.prompt_token_ids)
    assert all(part in text for part in ('"name": "add"}}', '"arguments": {"a": 1}}', "<tool_response>\n3")), text
    with llm.stream(messages, greedy(1), tools=tools) as stream:
        assert list(stream.request.prompt_ids) == list(done.prompt_token_ids)

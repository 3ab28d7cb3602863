"""Lesson 6. Streams: the same tokens and text as all at once, stop strings, neighbours, and no block left behind."""

import pytest

from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.errors import UserError
from mini_engine.llm import LLM
from mini_engine.pocket import POCKET_DIR

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm():
    return LLM.load(POCKET_DIR, num_blocks=64)


@pytest.fixture(autouse=True)
def nothing_held_afterwards(llm):
    yield
    assert llm.engine.scheduler.manager.blocks_by_state.held == 0, "a stream left blocks behind"
    assert not llm.engine.has_unfinished


def greedy(max_tokens=20, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def test_a_stream_is_the_answer_in_pieces(llm):
    deltas = list(llm.stream(PROMPT, greedy()))
    whole = llm.generate([llm.encode(PROMPT)], greedy(), progress=False)[0]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == llm.tokenizer.decode(whole.token_ids)
    assert len(deltas) > 5, "the answer came in one piece"


def test_only_the_last_delta_has_a_reason(llm):
    reasons = [delta.finish_reason for delta in llm.stream(PROMPT, greedy(4))]
    assert reasons == [None, None, None, FinishReason.LENGTH]


def test_an_end_token_gives_the_reason_stop_and_is_not_shown(llm):
    *_, last = llm.stream([{"role": "user", "content": "What is the capital of Japan?"}], greedy(60))
    assert last.finish_reason == FinishReason.STOP
    assert last.token_ids[-1] in llm.engine.config.eos_token_ids and "<|" not in last.text


def test_a_stop_string_ends_the_answer_and_is_not_shown(llm):
    full = llm.answer(PROMPT, greedy())
    stop = full[6:12]
    deltas = list(llm.stream(PROMPT, greedy(), stops=[stop]))
    assert "".join(delta.text for delta in deltas) == full[: full.index(stop)], f"up to {stop!r} and no further"
    assert deltas[-1].finish_reason == FinishReason.STOP


def test_streams_read_in_turns_share_their_steps_and_not_their_tokens(llm):
    prompts = [PROMPT, "Once upon a time", "Count: one, two, three,"]
    alone = [llm.answer(prompt, greedy()) for prompt in prompts]
    streams, texts = [llm.stream(prompt, greedy()) for prompt in prompts], [""] * 3
    for _ in range(20):
        for i, stream in enumerate(streams):
            delta = next(stream, None)
            texts[i] += delta.text if delta else ""
    for stream in streams:
        stream.close()
    assert texts == alone


@pytest.mark.parametrize("leave", [lambda stream: stream.close(), lambda stream: None])
def test_a_stream_that_nobody_begins_to_read_is_aborted_too(llm, leave):
    leave(llm.stream(PROMPT, greedy()))
    assert not llm.engine.has_unfinished, "its request waits for ever, and is computed for nobody"


@pytest.mark.parametrize("stops", ["END", [5], [b"END"]])
def test_stops_that_are_no_list_of_texts_are_refused_and_nothing_waits(llm, stops):
    with pytest.raises(UserError, match="give a list of texts"):
        llm.stream(PROMPT, greedy(), stops=stops)
    assert not llm.engine.has_unfinished


def test_an_answer_that_the_engine_could_not_finish_is_an_error_and_no_short_text(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.runner, "run", lambda chunks: 1 / 0)
    with pytest.raises(RuntimeError, match="could not finish this answer: ZeroDivisionError"):
        llm.answer(PROMPT, greedy())


def test_half_a_character_is_refused(llm):
    for prompt in ("a\ud83d", [{"role": "user", "content": "a\ud83d"}]):
        with pytest.raises(UserError):
            llm.encode(prompt)


def test_leaving_a_stream_early_frees_its_blocks(llm):
    stream = llm.stream(PROMPT, greedy())
    next(stream)
    assert llm.engine.scheduler.manager.blocks_by_state.held > 0
    stream.close()
    assert llm.engine.scheduler.manager.blocks_by_state.held == 0, "close must abort the request"


@pytest.mark.parametrize(
    "prompt, words", [("", "the prompt is empty"), ([5000], "token id 5000"), ([1] * 9000, "8192")]
)
def test_a_prompt_that_cannot_run_is_refused_where_it_is_asked(llm, prompt, words):
    with pytest.raises(UserError, match=words):
        llm.stream(prompt, greedy())


def test_a_conversation_goes_through_the_chat_template(llm):
    ids = llm.encode([{"role": "user", "content": "Hi"}])
    text = llm.tokenizer.decode(ids, skip_special=False)
    assert text.startswith("<|im_start|>user\nHi<|im_end|>") and text.endswith("<|im_start|>assistant\n"), text

"""Lesson 7. Fields that client libraries send by default: neutral values, biases, echo, ids, and running usage."""

import json

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.engine.answer import AnswerText
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.server.errors import ApiError
from mini_engine.server.json_text import to_json
from tests.l7.service import Service, greedy, read_events, their_model, tokenizer

pytestmark = pytest.mark.reference  # no task is about this

PATHS = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}
NEUTRAL = {
    "logit_bias": {}, "store": False, "metadata": {"run": "7"}, "service_tier": "auto", "user": "me", "n": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "stop": [], "seed": 3, "safety_identifier": "x", "request_id": "r7",
    "reasoning_effort": "high", "verbosity": "low", "response_format": {"type": "text"},
    "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": r"\s*",
}  # fmt: skip
NEUTRAL_OF = {
    "/v1/completions": {"best_of": 1, "echo": False, "suffix": "", "logprobs": None},
    "/v1/chat/completions": {
        "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "modalities": ["text"], "logprobs": False,
        "top_logprobs": 0, "best_of": 1, "echo": False, "skip_special_tokens": True, "chat_template_kwargs": {},
    },
}  # fmt: skip
LOUD = {
    "/v1/completions": {"best_of": 3, "suffix": "x", "store": True, "service_tier": "flex"},
    "/v1/chat/completions": {
        "modalities": ["audio"], "audio": {}, "store": True, "best_of": 2, "echo": True, "skip_special_tokens": False,
        "chat_template_kwargs": {"messages": []},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    config = SchedulerConfig(chunked_prefill_size=3)
    with Service(scheduler_config=config, allow_origins=("https://app.example",)) as service:
        yield service


@pytest.mark.parametrize("path", PATHS)
def test_a_temperature_near_0_is_greedy_and_minus_one_turns_a_filter_off(server: Service, path):
    body = PATHS[path] | {"max_tokens": 5, "return_token_ids": True}
    found = [
        server.post(path, body | {"temperature": temperature, "top_k": -1, "seed": -1}).body["choices"][0]["token_ids"]
        for temperature in (0, 1e-7)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**64 - 2])
def test_choices_of_a_seed_at_the_end_of_its_range_differ(server: Service, seed):
    body = PATHS["/v1/completions"] | {
        "max_tokens": 12,
        "temperature": 3,
        "seed": seed,
        "n": 3,
        "return_token_ids": True,
    }
    first, again = (
        [tuple(choice["token_ids"]) for choice in server.post("/v1/completions", body).body["choices"]]
        for _ in range(2)
    )
    assert first == again and len(set(first)) == 3


@pytest.mark.parametrize("path", PATHS)
def test_values_that_change_nothing_are_taken(server: Service, path):
    body = PATHS[path] | {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    plain = server.post(path, body).body["choices"][0]["token_ids"]
    found = server.post(path, body | NEUTRAL | NEUTRAL_OF[path])
    assert found.status == 200, found.body
    assert found.body["choices"][0]["token_ids"] == plain


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in LOUD.items() for name in names])
def test_values_that_would_change_something_are_refused_by_name(server: Service, path, name):
    found = server.post(path, PATHS[path] | {"max_tokens": 1, name: LOUD[path][name]})
    assert found.status == 400 and found.body["error"]["param"] == name, found


@pytest.mark.parametrize(("name", "value"), [("store", 0), ("best_of", True), ("skip_special_tokens", 1.0)])
def test_an_equal_value_of_another_type_is_refused(server: Service, name, value):
    found = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1, name: value})
    assert found.status == 400 and found.body["error"]["param"] == name, found


def test_a_bias_forbids_and_favours(server: Service):
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    first = greedy((5, 6, 7), 1)[0]
    found = server.post("/v1/completions", body | {"logit_bias": {str(first): -100}}).body["choices"][0]["token_ids"]
    assert first not in found
    found = server.post("/v1/completions", body | {"logit_bias": {"9": 100}}).body["choices"][0]["token_ids"]
    assert found == [9] * 6


@pytest.mark.parametrize("bias", [{"x": 1}, {"-1": 1}, {"99999": 1}, {"5": 101}, {"5": "1"}, [5]])
def test_a_bias_that_cannot_be_is_refused(server: Service, bias):
    found = server.post("/v1/completions", {"prompt": [5], "logit_bias": bias})
    assert found.status == 400 and found.body["error"]["param"] == "logit_bias", found


# Echo, with the prompt's log probabilities


@pytest.fixture(scope="module")
def expected():
    """Hugging Face's log probabilities of a prompt's tokens, and whether each is the best one."""
    prompt = list(range(700, 740))
    with torch.inference_mode():
        logs = their_model()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return prompt, [float(logs[i, token]) for i, token in enumerate(prompt[1:])], logs


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_hugging_face_s_log_probabilities(server: Service, expected, max_tokens, stream):
    prompt, logprobs, _ = expected
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    for _ in range(2):  # the second time, the prefix cache holds the prompt and no logits
        found = server.post("/v1/completions", body | {"stream": stream}).body
        chunks = [json.loads(event) for event in read_events(found)[:-1]] if stream else [found]
        told = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["token_logprobs"]]
        assert told[0] is None and len(told) == len(prompt) + max_tokens
        assert told[1 : len(prompt)] == pytest.approx(logprobs, abs=2e-5)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text.startswith(tokenizer().text_of(prompt))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert found["usage"]["completion_tokens"] == max_tokens


def test_the_best_token_is_the_best_of_its_alternatives(server: Service, expected):
    """lm-eval asks whether a continuation is the greedy one."""
    prompt = expected[0]
    greedy_prompt = prompt[:5] + greedy(tuple(prompt[:5]), 4)
    body = {"prompt": [greedy_prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, second = server.post("/v1/completions", body).body["choices"]
    for choice, is_greedy in ((first, True), (second, False)):
        told = choice["logprobs"]
        pairs = [*zip(told["token_logprobs"], told["top_logprobs"], strict=True)][5:-1]
        assert all(value == max(top.values()) for value, top in pairs) is is_greedy
    assert first["logprobs"]["text_offset"][0] == 0


def test_a_preempted_prompt_is_scored_once():
    config = SchedulerConfig(watermark=0.0, chunked_prefill_size=7)
    prompts = [list(range(start, start + 30)) for start in (100, 200, 300, 400)]
    with Service(num_blocks=30, scheduler_config=config) as service:
        params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0, logprobs=0)
        engine = service.engine
        service.worker.close()
        requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        while engine.has_unfinished:
            engine.step()
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == greedy(tuple(prompt), 20) and request.finish_reason == FinishReason.LENGTH
        with torch.inference_mode():
            logs = their_model()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        want = [float(logs[i, token]) for i, token in enumerate(prompt[1:])]
        assert [one.chosen for one in request.prompt_logprobs] == pytest.approx(want, abs=2e-5)


def test_echo_without_log_probabilities_is_the_prompt_and_the_answer(server: Service):
    found = server.post("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 3, "temperature": 0}).body
    ids = tokenizer().encode("Hello")
    assert found["choices"][0]["text"] == "Hello" + tokenizer().decode(greedy(tuple(ids), 3))


# Streams, headers


def test_usage_goes_with_every_chunk_if_asked_for(server: Service):
    asked = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "stream": True, "stream_options": asked}
    *events, _ = read_events(server.post("/v1/completions", body).body)
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4, counts


def test_a_request_id_comes_back(server: Service):
    assert server.get("/health", **{"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
    one, other = (server.get("/v1/models").headers["x-request-id"] for _ in range(2))
    assert one != other and len(one) >= 16
    assert server.get("/v1/nothing", **{"X-Request-Id": "two words"}).headers["x-request-id"] != "two words"


def test_pages_from_allowed_origins_may_ask(server: Service):
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    more = ask | {"Access-Control-Request-Headers": "authorization"}
    found = server.request("OPTIONS", "/v1/chat/completions", None, more)
    assert found.status == 200 and found.headers["access-control-allow-origin"] == "https://app.example"
    refused = server.request("OPTIONS", "/v1/chat/completions", None, ask | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_no_page_may_ask_by_default():
    with Service() as service:
        found = service.get("/v1/models", Origin="https://app.example")
        assert "access-control-allow-origin" not in found.headers


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
PART = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
TURN = {"role": "assistant", "content": "Yes?", "reasoning_content": "They greet me.", "reasoning": "They greet me."}
SENT = {
    "cache_control in a part": {"messages": [{"role": "user", "content": [PART]}]},
    "cache_control of a turn": {
        "messages": [{"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}]
    },
    "include_obfuscation": {"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": True}},
}


@pytest.mark.parametrize("name", SENT)
def test_what_real_clients_send_and_what_changes_nothing_is_accepted(server: Service, name):
    plain = server.post("/v1/chat/completions", CHAT).body["choices"][0]["message"]["content"]
    found = server.post("/v1/chat/completions", CHAT | SENT[name])
    assert found.status == 200, found
    if "stream" not in SENT[name]:
        assert found.body["choices"][0]["message"]["content"] == plain, "it was to change nothing"


def test_what_an_earlier_turn_thought_changes_nothing_if_the_template_does_not_show_it(server: Service):
    plain = {"role": "assistant", "content": "Yes?"}
    asked = [
        CHAT | {"messages": [*CHAT["messages"], turn, {"role": "user", "content": "No"}]} for turn in (plain, TURN)
    ]
    first, second = (server.post("/v1/chat/completions", body).body["usage"]["prompt_tokens"] for body in asked)
    assert first == second


def test_a_cached_tool_is_described_as_any_other(server: Service):
    tool = {"type": "function", "function": {"name": "f", "description": "A tool."}}
    bodies = [CHAT | {"tools": [tool | more]} for more in ({}, {"cache_control": {"type": "ephemeral"}})]
    first, second = (server.post("/v1/chat/completions", body).body["usage"]["prompt_tokens"] for body in bodies)
    assert first == second, "the model must not read what it is not told"


# Numbers that JSON does not have


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_ends_the_answer_with_an_error(value):
    with pytest.raises(ApiError) as caught:
        to_json({"logprob": value})
    assert caught.value.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_nan_is_an_error_and_no_invalid_json(stream):
    with Service() as service:
        run = service.engine.runner.run
        service.engine.runner.run = lambda chunks: run(chunks) * float("nan")
        body = {"prompt": [5], "max_tokens": 3, "temperature": 0, "logprobs": 1, "stream": stream}
        found = service.post("/v1/completions", body)
        service.wait_until_idle()
    assert "NaN" not in str(found.body).replace("are not finite", "")
    if stream:
        assert '"type":"server_error"' in found.body and "[DONE]" not in found.body
    else:
        assert found.status == 500 and found.body["error"]["type"] == "server_error"


@pytest.mark.parametrize("wrong", [{"prompt_logprobs": 99}, {"logit_bias": {1.5: 1}}, {"logit_bias": 3}])
def test_wrong_parameters_are_one_sentence(wrong):
    with pytest.raises(UserError):
        SamplingParams(**wrong)


def test_wrong_types_are_one_sentence(server: Service):
    calls = (
        lambda: AnswerText(tokenizer(), stops=5),
        lambda: tokenizer().encode(None),
        lambda: list(server.worker.stream_sync([1], None)),
        lambda: list(server.worker.stream_sync(None, SamplingParams())),
    )
    for call in calls:
        with pytest.raises(UserError):
            call()

"""Lesson 7. Fields that client libraries send by default: neutral values, biases, echo, ids, and running usage."""

import pytest
import torch

from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.server.errors import ApiError
from mini_engine.server.json_text import to_json
from tests.shared.service import Service, greedy, their_model, tokenizer

pytestmark = pytest.mark.reference  # no task is about this

SERVER = {
    "scheduler_config": SchedulerConfig(chunked_prefill_size=3),
    "allow_origins": ("https://app.example",),
}
PROMPT = list(range(700, 740))
IDS = {"return_token_ids": True}
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


def ids_of(server: Service, path: str, body: dict) -> list[list[int]]:
    """The tokens of a request's answers."""
    found = server.post(path, body | IDS)
    assert found.status == 200, found.body
    return [choice["token_ids"] for choice in found.body["choices"]]


@pytest.mark.parametrize("path", PATHS)
def test_a_temperature_near_0_is_greedy_and_minus_one_turns_a_filter_off(server: Service, path):
    body = PATHS[path] | {"max_tokens": 5, "top_k": -1, "seed": -1}
    assert ids_of(server, path, body | {"temperature": 0}) == ids_of(server, path, body | {"temperature": 1e-7})


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**64 - 2])
def test_choices_of_a_seed_at_the_end_of_its_range_differ(server: Service, seed):
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 3, "seed": seed, "n": 3}
    first, again = (ids_of(server, "/v1/completions", body) for _ in range(2))
    assert first == again and len(set(map(tuple, first))) == 3


@pytest.mark.parametrize("path", PATHS)
def test_values_that_change_nothing_are_taken(server: Service, path):
    body = PATHS[path] | {"max_tokens": 5, "temperature": 0}
    assert ids_of(server, path, body | NEUTRAL | NEUTRAL_OF[path]) == ids_of(server, path, body)


def test_a_bias_forbids_and_favours(server: Service):
    body, first = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}, greedy((5, 6, 7), 1)[0]
    assert first not in ids_of(server, "/v1/completions", body | {"logit_bias": {str(first): -100}})[0]
    assert ids_of(server, "/v1/completions", body | {"logit_bias": {"9": 100}}) == [[9] * 6]


# Echo, with the prompt's log probabilities


def scores_of(prompt: list[int]) -> list[float]:
    """Hugging Face's log probabilities of a prompt's tokens behind the first."""
    with torch.inference_mode():
        logs = their_model()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [float(logs[i, token]) for i, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_hugging_face_s_log_probabilities(server: Service, max_tokens, stream):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    for _ in range(2):  # the second time, the prefix cache holds the prompt and no logits
        chunks = server.stream("/v1/completions", body) if stream else [server.post("/v1/completions", body).body]
        told = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["token_logprobs"]]
        assert told[0] is None and len(told) == len(PROMPT) + max_tokens
        assert told[1 : len(PROMPT)] == pytest.approx(scores_of(PROMPT), abs=2e-5)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text.startswith(tokenizer().text_of(PROMPT))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == max_tokens


def test_the_best_token_is_the_best_of_its_alternatives(server: Service):
    """lm-eval asks whether a continuation is the greedy one."""
    greedy_prompt = PROMPT[:5] + greedy(tuple(PROMPT[:5]), 4)
    body = {"prompt": [greedy_prompt, PROMPT], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
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
        assert [one.chosen for one in request.prompt_logprobs] == pytest.approx(scores_of(prompt), abs=2e-5)


def test_echo_without_log_probabilities_is_the_prompt_and_the_answer(server: Service):
    found = server.post("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 3, "temperature": 0}).body
    ids = tokenizer().encode("Hello")
    assert found["choices"][0]["text"] == "Hello" + tokenizer().decode(greedy(tuple(ids), 3))


# Streams, headers


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


def test_a_stream_option_that_changes_nothing_is_accepted(server: Service):
    asked = {"stream_options": {"include_obfuscation": False, "include_usage": True}}
    assert server.stream("/v1/chat/completions", CHAT | asked)[-1]["usage"]["completion_tokens"] == 2


# Numbers that JSON does not have


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_ends_the_answer_with_an_error(value):
    with pytest.raises(ApiError) as caught:
        to_json({"logprob": value})
    assert caught.value.status_code == 500

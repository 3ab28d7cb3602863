"""Lesson 7. The server through OpenAI's own client: tokens equal Hugging Face's, alone and together."""

import pytest

from mini_engine.server.metrics import Metrics
from tests.shared.service import LONG, Service, flat, greedy, their_model, tokenizer
from tests.support import hf_greedy, imported_by

PROMPTS = [[5, 6, 7], [100, 200, 300, 400, 500], [42], list(range(700, 760))]
IDS = {"return_token_ids": True}


@pytest.mark.reference
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_the_tokens_that_are_expected_here_are_hugging_face_s(prompt):
    assert greedy(tuple(prompt), 40) == hf_greedy(their_model(), prompt, 40)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_completion_s_tokens_are_the_model_s(client, prompt):
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0, extra_body=IDS)
    expected = greedy(tuple(prompt), 20)
    assert found.choices[0].token_ids == expected and found.choices[0].finish_reason == "length"
    assert found.choices[0].text == tokenizer().decode(expected)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), 20)
    assert found.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_completion_is_the_same(client):
    asked = dict(model="tiny", prompt=PROMPTS[1], max_tokens=40, temperature=0, extra_body=IDS)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    expected = greedy(tuple(PROMPTS[1]), 40)
    assert flat(choice.token_ids for choice in choices) == expected
    assert "".join(choice.text for choice in choices) == tokenizer().decode(expected)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 40


def test_a_chat_is_its_template_s_completion(client):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    plain = [messages[0], {"role": "user", "content": "Hi"}]
    expected = greedy(tuple(tokenizer().encode_chat(plain)), 12)
    asked = dict(model="tiny", messages=messages, max_completion_tokens=12, temperature=0, extra_body=IDS)
    found = client.chat.completions.create(**asked)
    assert found.choices[0].token_ids == expected
    assert found.choices[0].message.content == tokenizer().decode(expected)
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert flat(piece.token_ids for piece in pieces) == expected
    assert "".join(piece.delta.content or "" for piece in pieces) == tokenizer().decode(expected)
    assert pieces[0].delta.role == "assistant"


@LONG
def test_a_chat_without_a_limit_fills_the_context(client):
    messages = [{"role": "user", "content": "Hi"}]
    found = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert found.usage.total_tokens == 512 and found.choices[0].finish_reason == "length"


def test_several_prompts_and_choices_come_in_order(client):
    found = client.completions.create(
        model="tiny", prompt=PROMPTS[:2], n=3, max_tokens=6, temperature=0, extra_body=IDS
    )
    assert [choice.index for choice in found.choices] == list(range(6))
    expected = [greedy(tuple(prompt), 6) for prompt in PROMPTS[:2] for _ in range(3)]
    assert [choice.token_ids for choice in found.choices] == expected
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 36)


def test_a_stop_token_says_stop_and_is_counted(client):
    expected = greedy(tuple(PROMPTS[0]), 8)
    stop = expected[5]
    asked = {"stop_token_ids": [stop]} | IDS
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=8, temperature=0, extra_body=asked)
    kept = expected[: expected.index(stop) + 1]
    assert (found.choices[0].token_ids, found.choices[0].finish_reason) == (kept, "stop")
    assert found.usage.completion_tokens == len(kept)


def test_the_client_s_errors_are_its_own_classes(client, openai):
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.completions.create(model="tiny", prompt="x", extra_body={"tools": []})
    with pytest.raises(openai.NotFoundError, match="'gpt-9'"):
        client.completions.create(model="gpt-9", prompt="x")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_metrics_and_health(service: Service):
    service.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
    text = service.get("/metrics").body
    for line in (
        "mini_engine_requests_waiting 0.0",
        "mini_engine_requests_running 0.0",
        'mini_engine_tokens_total{phase="prefill"} 3.0',
        'mini_engine_tokens_total{phase="decode"} 4.0',
        "mini_engine_cached_prompt_tokens_total 0.0",
        "mini_engine_new_tokens_total 5.0",
        "mini_engine_time_to_first_token_seconds_count 1.0",
        "mini_engine_time_between_tokens_seconds_count 4.0",
        'mini_engine_blocks{state="held"} 0.0',
        "mini_engine_preemptions_total 0.0",
        "mini_engine_aborts_total 0.0",
        "mini_engine_request_queue_seconds_count 1.0",
        "mini_engine_request_seconds_count 1.0",
        "mini_engine_request_prompt_tokens_sum 3.0",
        "mini_engine_request_new_tokens_sum 5.0",
        'mini_engine_responses_total{status="200"} 1.0',
    ):
        assert f"\n{line}\n" in text, f"{line} is not in\n{text}"
    service.worker.close()
    assert service.get("/health").status == 503
    assert service.post("/v1/completions", {"prompt": [1]}).status == 503


@pytest.mark.reference
def test_dashboards_made_for_vllm_find_its_names():
    with Service(vllm_metrics=True) as service:
        service.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
        text = service.get("/metrics").body
    labels = 'engine="0",model_name="tiny"'
    for name, value in {
        f"num_requests_running{{{labels}}}": 0,
        f"num_requests_waiting{{{labels}}}": 0,
        f"kv_cache_usage_perc{{{labels}}}": 0,
        f"prompt_tokens_total{{{labels}}}": 3,
        f"generation_tokens_total{{{labels}}}": 5,
        f"prefix_cache_queries_total{{{labels}}}": 3,
        f"prefix_cache_hits_total{{{labels}}}": 0,
        f"num_preemptions_total{{{labels}}}": 0,
        'request_success_total{engine="0",finished_reason="length",model_name="tiny"}': 1,
        f"time_to_first_token_seconds_count{{{labels}}}": 1,
        f"inter_token_latency_seconds_count{{{labels}}}": 4,
        f"request_queue_time_seconds_count{{{labels}}}": 1,
        f"request_prefill_time_seconds_count{{{labels}}}": 1,
        f"request_decode_time_seconds_count{{{labels}}}": 1,
        f"e2e_request_latency_seconds_count{{{labels}}}": 1,
        'e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"}': 1,
        f"request_prompt_tokens_sum{{{labels}}}": 3,
        f"request_generation_tokens_sum{{{labels}}}": 5,
    }.items():
        assert f"\nvllm:{name} {float(value)}\n" in text, f"{name} is not in\n{text}"
    assert "\nmini_engine_new_tokens_total 5.0\n" in text, "its own names stay"
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(families) == len(set(families)), "each family once"


@pytest.mark.reference
def test_reasons_that_vllm_does_not_have_count_as_errors():
    metrics, name = Metrics("tiny"), "vllm:request_success_total"
    for reason in ("grammar", "error", "grammar", "stop"):
        metrics.ends.labels(reason).inc()
    text = metrics.text().decode()
    for reason, value in (("error", 3.0), ("stop", 1.0)):
        assert f'{name}{{engine="0",finished_reason="{reason}",model_name="tiny"}} {value}' in text
    assert text.count(f"{name}{{") == 2


@pytest.mark.reference
def test_two_servers_in_one_process_do_not_share_their_figures():
    with Service() as one, Service() as other:
        one.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5})
        assert "mini_engine_new_tokens_total 0.0" in other.get("/metrics").body
        assert "vllm:" not in other.get("/metrics").body, "vLLM's names are for those who ask for them"


def test_the_command_s_help_imports_neither_torch_nor_the_server():
    assert not imported_by("serve", "--help") & {"torch", "tokenizers", "fastapi", "uvicorn"}

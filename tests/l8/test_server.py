"""Lesson 8. Prefix sharing as a client of lesson 7's server sees it: cached tokens, the hit rate, its own salt."""

import pytest

from mini_engine.kv.cache_coordinator import caching_manager

PROMPT = list(range(100, 120))  # five blocks of 4 tokens; the last block is always computed
SHARING = {"engine_options": {"manager": caching_manager}}


@pytest.fixture
def service(serve_tiny):
    return serve_tiny(**SHARING)


@pytest.fixture
def expected(service):
    return service.greedy(tuple(PROMPT), 5)


def ask(service, prompt=PROMPT, headers=None, **options):
    """Return (cached tokens, new token ids) of an answer."""
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = service.post("/v1/completions", body | options, **headers or {}).body
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]


def test_the_second_request_finds_what_the_first_computed(service, expected):
    assert ask(service) == (0, expected)
    assert ask(service) == (16, expected), "the last token is computed again, so four blocks of five are found"
    assert "\nmini_engine_prefix_hit_rate 0.4\n" in service.get("/metrics").body, "16 of 2 × 20 prompt tokens"


def test_with_a_salt_only_requests_of_the_same_salt_share(service, expected):
    assert ask(service, cache_salt="ours") == (0, expected)
    assert ask(service) == (0, expected), "a request without a salt must not find it, nor reveal that it is there"
    assert ask(service, cache_salt="theirs") == (0, expected), "neither must a request with another salt"
    assert ask(service, cache_salt="ours") == (16, expected)


def test_clients_of_different_keys_share_nothing(serve_tiny, expected):
    """How soon an answer begins would tell one client what another has sent."""
    service = serve_tiny(**SHARING, api_keys=("one", "two"))

    def asked_by(key, **options):
        return ask(service, headers={"Authorization": f"Bearer {key}"}, **options)

    assert asked_by("one") == (0, expected)
    assert asked_by("two") == (0, expected), "a request with another key must not find it"
    assert asked_by("one", cache_salt="ours") == (0, expected)
    assert asked_by("two", cache_salt="ours") == (0, expected), "nor with the same salt: a salt is its key's own"
    assert asked_by("two") == asked_by("one") == asked_by("two", cache_salt="ours") == (16, expected)


def test_no_salt_leads_into_another_namespace():
    namespace = pytest.importorskip("mini_engine.server.service", reason="needs the extra 'server'").namespace
    names = [None, "", "x", "null", '["x", null]']
    found = {namespace(tenant, salt) for tenant in names for salt in names}
    assert len(found) == len(names) ** 2, "each pair of tenant and salt is a namespace of its own"


def test_answers_of_one_request_share_its_prompt(service):
    body = {"prompt": PROMPT, "max_tokens": 2, "n": 3, "temperature": 0, "ignore_eos": True}
    service.post("/v1/completions", body)
    service.wait_until_idle()
    found = service.engine.scheduler.manager.coordinator.prefixes.stats.found_tokens
    assert found == 2 * 16, "the twins wait a step and find the first one's blocks"


def test_a_prompt_that_is_scored_is_computed_whole(service):
    """Tokens found in the tree have no logits, so a request for its prompt's log probabilities takes none of them."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 1}
    cold = service.post("/v1/completions", body).body
    ask(service)
    found = service.post("/v1/completions", body).body
    scores = [answer["choices"][0]["logprobs"]["token_logprobs"][: len(PROMPT)] for answer in (cold, found)]
    assert len(scores[1]) == len(PROMPT) and scores[1][1:] == pytest.approx(scores[0][1:], abs=2e-5)
    assert ask(service)[0] == 16, "and the others go on sharing"

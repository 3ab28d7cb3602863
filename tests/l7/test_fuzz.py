"""Lesson 7. Whatever JSON comes in, the answer is a completion or a refusal that says why: never a 5xx."""

import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.server.chat_protocol import ChatRequest
from mini_engine.server.protocol import CompletionRequest
from tests.shared.service import Service
from tests.support import OneOf

pytestmark = pytest.mark.reference  # no task is about this

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 21, 10**6, 2**70, 10**400]),
    st.sampled_from([-0.5, 0.0, 1e-9, 0.5, 1.0, 1e300, float("nan"), float("inf"), float("-inf")]),
    st.text(max_size=8),
    st.sampled_from(["", "x", "\ud83d", "\x00", "👩‍👩‍👧", "<|im_end|>", "tiny", "y" * 2000]),
)
JSON = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=9) | JSON},
)
PATHS = {
    "/v1/completions": (CompletionRequest, st.fixed_dictionaries({"prompt": st.text(max_size=9) | JSON})),
    "/v1/chat/completions": (
        ChatRequest,
        st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3) | JSON}),
    ),
}


def bodies(model, base):
    """The least that a request needs, a few tokens, and some of its parameters with any value."""
    names = st.sampled_from([*model.model_fields, "tools", "logit_bias"])
    return st.builds(
        lambda given, more: {"max_tokens": 2, **given, **more}, base, st.dictionaries(names, JSON, max_size=3)
    )


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_parameters_are_answered_or_refused(server: Service, path, data):
    body = data.draw(bodies(*PATHS[path]))
    found = server.post(path, json.dumps(body).encode())
    assert found.status < 500, f"{body} was answered with {found}"
    if found.status >= 400:
        assert isinstance(found.body["error"]["message"], str) and found.body["error"]["type"]


@given(data=st.binary(max_size=60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(server: Service, data):
    assert server.post("/v1/completions", data).status == OneOf(400, 413)


@given(path=st.text("/v1chatmodels.%?#:@é\n ", max_size=20), method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_is_found_or_not(server: Service, path, method):
    assert server.request(method, "/v1/" + quote(path), None, {}).status < 500


def test_afterwards_nobody_is_left(server: Service):
    server.wait_until_idle()
    assert server.worker.is_alive and server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200

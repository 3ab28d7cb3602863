"""Course machinery. Conformance: log probabilities are Hugging Face's, of answers and of prompts."""

from typing import Any

import pytest
import torch

from mini_engine.gpu.graphs import no_graph
from tests.families.engines import (
    LONG,
    answered,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    hf_logits,
    limits_of,
    prompts_of,
    whole,
)
from tests.families.rows import each_kind, nightly

CLOSE: Any = dict(atol=1e-3, rtol=1e-3)


def logprobs_of(model, request):
    """Return Hugging Face's log probabilities behind each token of a request, and its tokens from the second on."""
    text = [*request.prompt_ids, *request.output_ids]
    [logits] = hf_logits(model, [text])
    return logits[:-1].float().log_softmax(-1), torch.tensor(text[1:])


def check_logprobs(model, request):
    theirs, tokens = logprobs_of(model, request)
    first = len(request.prompt_ids) - 1
    chosen = theirs.gather(1, tokens[:, None])[:, 0]
    if request.params.prompt_logprobs is not None:
        got = torch.tensor([one.chosen for one in request.prompt_logprobs])
        torch.testing.assert_close(got, chosen[:first], **CLOSE)
    if request.params.logprobs is not None:
        torch.testing.assert_close(torch.tensor([one.chosen for one in request.logprobs]), chosen[first:], **CLOSE)
        best = theirs[first:].topk(request.params.logprobs).values
        top = torch.tensor([[logprob for _, logprob in one.top] for one in request.logprobs])
        torch.testing.assert_close(top, best, **CLOSE)


@each_kind
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(one, marks=nightly) for one in ({"capture": no_graph}, {"speculate": 3}))],
    ids=["eager", "padded", "guesses"],
)
def test_behind_a_cached_prefix(model, options):
    engine = engine_of(model, **options)
    for when, found in (("cold", [0]), ("warm", whole([LONG]))):
        requests = [
            *ask(engine, [LONG], name=when, logprobs=2),
            *ask(engine, prompts_of(model)[:3], name=f"{when} too"),
        ]
        drain(engine)
        assert check(model, requests, when)[:1] == found
        check_logprobs(model, requests[0])
    check_nothing_is_lost(engine)


@each_kind
def test_a_prompt_s_own_are_computed_from_its_first_token(model):
    engine = engine_of(model, limits_of(13, 16))
    answered(engine, model, "before", [LONG])
    requests = [
        *ask(engine, [LONG[:60]], prompt_logprobs=0, logprobs=1),
        *ask(engine, prompts_of(model)[:3], name="beside"),
    ]
    drain(engine)
    assert check(model, requests, "with prompt_logprobs")[0] == 0, "what is cached has no logits"
    check_logprobs(model, requests[0])
    check_nothing_is_lost(engine)

"""Lesson 0. The loop: which tokens it feeds, which it chooses, when it stops."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mini_engine.engine import loop
from mini_engine.errors import UserError
from mini_engine.kv.no_cache import NoCache, Recompute
from tests.support import FAMILIES, both, hf_greedy, some_ids


@dataclass
class Plan:
    positions: torch.Tensor


class CountingModel:
    """Predicts token + 1 after each token, and records what it was fed."""

    config = SimpleNamespace(check_prompt=lambda ids, n: None)

    def __init__(self, vocab_size=50):
        self.vocab_size, self.fed, self.rows = vocab_size, [], []

    def __call__(self, token_ids, kv, meta, rows=None):
        self.fed.append(token_ids.tolist())
        self.rows.append(rows.tolist())
        logits = torch.zeros(len(rows), self.vocab_size)
        logits[torch.arange(len(rows)), token_ids[rows] + 1] = 1.0
        return logits


class LastTwo:
    """A sequence that always feeds the last two tokens, or the only one."""

    def __init__(self):
        self.calls = []

    def plan(self, token_ids):
        self.calls.append(("plan", list(token_ids)))
        return Plan(torch.arange(max(0, len(token_ids) - 2), len(token_ids)))

    def commit(self, meta):
        self.calls.append(("commit", meta.positions.tolist()))


@pytest.fixture
def stub_choice(monkeypatch):
    """Replace task 1, so that the loop can be tested on its own."""
    monkeypatch.setattr(loop, "next_token", lambda logits: int(torch.argmax(logits)))


def test_next_token_is_the_id_of_the_largest_logit():
    assert loop.next_token(torch.tensor([0.1, -2.0, 3.5, 3.4])) == 2, "greedy means the id with the largest logit"


def test_next_token_is_a_plain_int():
    assert type(loop.next_token(torch.tensor([0.0, 1.0]))) is int, "return a Python int, not a tensor"


def test_the_loop_feeds_what_the_plan_names(stub_choice):
    model, sequence = CountingModel(), LastTwo()
    out = loop.generate(model, None, sequence, [7, 8, 9], 3)
    assert model.fed == [[8, 9], [9, 10], [10, 11]], f"fed {model.fed}; feed the tokens at meta.positions, no others"
    assert out == [10, 11, 12], f"got {out}; the answer is the new tokens, without the prompt"


def test_logits_are_asked_for_the_last_token_only(stub_choice):
    model = CountingModel()
    loop.generate(model, None, LastTwo(), [7, 8, 9], 2)
    assert model.rows == [[1], [1]], f"rows were {model.rows}; only the logits of the last fed token are needed"


def test_commit_comes_after_each_forward_pass(stub_choice):
    sequence = LastTwo()
    loop.generate(CountingModel(), None, sequence, [7, 8], 2)
    names = [name for name, _ in sequence.calls]
    assert names == ["plan", "commit", "plan", "commit"], f"{names}: commit once after each forward pass"


def test_a_stop_token_ends_the_answer_and_is_part_of_it(stub_choice):
    out = loop.generate(CountingModel(), None, LastTwo(), [7], 10, stop_ids={10})
    assert out == [8, 9, 10], f"got {out}; the answer ends with the stop token"


def test_the_prompt_is_not_modified(stub_choice):
    prompt = [1, 2, 3]
    loop.generate(CountingModel(), None, LastTwo(), prompt, 4)
    assert prompt == [1, 2, 3], "the caller's list grew: copy the prompt before appending to it"


def test_no_new_tokens_means_no_forward_pass(stub_choice):
    model = CountingModel()
    assert loop.generate(model, None, LastTwo(), [1], 0) == []
    assert model.fed == []


def test_without_a_cache_every_step_feeds_every_token():
    plan = Recompute().plan([5, 6, 7])
    assert plan.positions.tolist() == [0, 1, 2], "without a cache, every position from 0 on is fed"
    assert plan.positions.dtype == torch.int64, "torch indices are int64"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 63])
def test_tokens_equal_hugging_face(family, length):
    ours, hf = both(family)
    prompt = some_ids(length, ours.config.vocab_size)
    got = loop.generate(ours, NoCache(), Recompute(), prompt, 64)
    want = hf_greedy(hf, prompt, 64)
    assert got == want, f"the answers differ from new token {first_difference(got, want)} on"


def test_tokens_equal_hugging_face_after_a_thousand_tokens():
    ours, hf = both("two, tied, wide heads")
    prompt = some_ids(1000, ours.config.vocab_size)
    assert loop.generate(ours, NoCache(), Recompute(), prompt, 12) == hf_greedy(hf, prompt, 12)


@pytest.mark.parametrize(
    "prompt, new_tokens, words",
    [
        ([], 1, "empty"),
        ([1, 160], 1, "160 is not in the vocabulary; ids run from 0 to 159"),
        ([-1], 1, "-1 is not in the vocabulary"),
        ([1, 2.5], 1, "2.5 is not in the vocabulary"),
        ([1, None], 1, "None is not in the vocabulary"),
        ("one", 1, "the prompt is of type str; give a list of token ids"),
        (torch.tensor([1, 2]), 1, "the prompt is of type Tensor"),
        (5, 1, "the prompt is of type int"),
        ([1] * 2000, 49, "2049 positions; the model has 2048"),
        ([1], -1, "max_new_tokens is -1"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_anything_runs(prompt, new_tokens, words):
    ours, _ = both("two, tied, wide heads")
    sequence = LastTwo()
    with pytest.raises(UserError, match=words):
        loop.generate(ours, NoCache(), sequence, prompt, new_tokens)
    assert sequence.calls == []


def first_difference(got, want):
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))

"""Lesson 0. The loop: which tokens it feeds, which it chooses, when it stops."""

from dataclasses import dataclass

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.engine import loop
from mini_engine.kv.no_cache import NoCache, Recompute
from tests.support import FAMILIES, both, first_difference, hf_greedy, must_raise, some_ids


@dataclass
class Plan:
    positions: torch.Tensor


class CountingConfig:
    """Refuses an empty prompt; records whether it was asked."""

    def __init__(self, events):
        self.events = events

    def check_prompt(self, prompt_ids, max_new_tokens=0):
        self.events.append(("check", list(prompt_ids), max_new_tokens))
        if not prompt_ids:
            raise UserError("the prompt is empty")


class CountingModel:
    """Predicts token + 1 after each token, and records what it was given."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, events=None, vocab_size=50):
        self.events = [] if events is None else events
        self.config = CountingConfig(self.events)
        self.vocab_size, self.fed, self.rows, self.given = vocab_size, [], [], []

    def __call__(self, token_ids, kv, meta, rows=None):
        self.events.append(("run", token_ids.tolist()))
        self.fed.append(token_ids.tolist())
        self.given.append((kv, meta))
        rows = torch.arange(len(token_ids)) if rows is None else rows
        self.rows.append((rows % len(token_ids)).tolist())
        logits = torch.zeros(len(rows), self.vocab_size)
        logits[torch.arange(len(rows)), token_ids[rows] + 1] = 1.0
        return logits


class LastTwo:
    """A sequence that always feeds the last two tokens, or the only one."""

    def __init__(self, events=None):
        self.events, self.plans = [] if events is None else events, []

    def plan(self, token_ids):
        self.events.append(("plan", list(token_ids)))
        self.plans.append(Plan(torch.arange(max(0, len(token_ids) - 2), len(token_ids))))
        return self.plans[-1]

    def commit(self, meta):
        self.events.append(("commit", meta.positions.tolist()))


@pytest.fixture
def stub_choice(monkeypatch):
    """Replace task 1, so that the loop can be tested on its own."""
    monkeypatch.setattr(loop, "next_token", lambda logits: int(torch.argmax(logits)))


@pytest.mark.task(1)
@pytest.mark.parametrize(
    "logits, best",
    [([0.1, -2.0, 3.5, 3.4], 2), ([-5.0, -0.5, -1.0], 1), ([0.25, -9.0, 0.5], 2), ([7.0, 0.0, 1.0], 0)],
)
def test_next_token_is_the_id_of_the_largest_logit(logits, best):
    got = loop.next_token(torch.tensor(logits))
    assert got == best, f"greedy means the id with the largest logit of {logits}"


@pytest.mark.task(1)
def test_next_token_is_a_plain_int():
    got = type(loop.next_token(torch.tensor([0.0, 1.0]))).__name__
    assert got == "int", "ids are kept in lists and in JSON: return a Python int"


@pytest.mark.task(4)
def test_the_answer_has_as_many_tokens_as_were_asked_for(stub_choice):
    out = loop.generate(CountingModel(), None, LastTwo(), [7, 8, 9], 3)
    assert len(out) == 3, f"max_new_tokens is 3: the answer is the new tokens, without the prompt, and not {out}"


@pytest.mark.task(4)
def test_the_loop_feeds_what_the_plan_names(stub_choice):
    model = CountingModel()
    loop.generate(model, None, LastTwo(), [7, 8, 9], 1)
    assert model.fed == [[8, 9]], "feed the tokens at meta.positions, here the last two of [7, 8, 9], and no others"


@pytest.mark.task(4)
def test_logits_are_asked_for_the_last_token_only(stub_choice):
    model = CountingModel()
    loop.generate(model, None, LastTwo(), [7, 8, 9], 1)
    assert model.rows == [[1]], (
        "the step feeds two tokens, and only the last one's logits are needed: pass the model its index as `rows`"
    )


@pytest.mark.task(4)
def test_the_plan_is_given_all_tokens_so_far(stub_choice):
    sequence = LastTwo()
    loop.generate(CountingModel(), None, sequence, [7, 8], 3)
    given = [event[1] for event in sequence.events if event[0] == "plan"]
    assert given == [[7, 8], [7, 8, 9], [7, 8, 9, 10]], (
        "each step plans with all tokens so far: the prompt and those chosen since"
    )


@pytest.mark.task(4)
def test_the_answer_follows_from_what_was_fed(stub_choice):
    model = CountingModel()
    out = loop.generate(model, None, LastTwo(), [7, 8, 9], 3)
    assert model.fed == [[8, 9], [9, 10], [10, 11]], "each step feeds the tokens at its own plan's positions"
    assert out == [10, 11, 12], "each step appends the token that the model's logits put first"


@pytest.mark.task(4)
def test_the_model_is_given_the_store_and_the_plan(stub_choice):
    model, sequence, store = CountingModel(), LastTwo(), object()
    loop.generate(model, store, sequence, [7, 8], 2)
    assert [kv for kv, _ in model.given] == [store, store], "give the model the `kv` that generate was given"
    assert all(given is plan for (_, given), plan in zip(model.given, sequence.plans, strict=True)), (
        "give the model the plan of this step, as `plan` returned it: the store reads it"
    )


@pytest.mark.task(4)
@pytest.mark.parametrize("stop_ids", [(), (10,)])
def test_commit_comes_after_each_forward_pass(stub_choice, stop_ids):
    events = []
    loop.generate(CountingModel(events), None, LastTwo(events), [7, 8], 2, stop_ids)
    names = [event[0] for event in events if event[0] != "check"]
    assert names == ["plan", "run", "commit"] * 2, (
        "every step is plan, run, commit, the last one too: commit records that the K and V are written"
    )
    committed, planned = ([event[1] for event in events if event[0] == name] for name in ("commit", "run"))
    assert [len(positions) for positions in committed] == [len(fed) for fed in planned], "commit the plan that was run"


@pytest.mark.task(4)
def test_a_stop_token_ends_the_answer_and_is_part_of_it(stub_choice):
    out = loop.generate(CountingModel(), None, LastTwo(), [7], 10, stop_ids={10})
    assert out == [8, 9, 10], "stop token 10 was chosen: the answer ends with the stop token"


@pytest.mark.task(4)
def test_a_stop_token_in_the_prompt_ends_nothing(stub_choice):
    out = loop.generate(CountingModel(), None, LastTwo(), [7, 3], 3, stop_ids=[7, 3])
    assert out == [4, 5, 6], (
        "the prompt ends with a stop token, as the turns of a chat do; only a chosen token ends the answer"
    )


@pytest.mark.task(4)
def test_the_prompt_is_not_modified(stub_choice):
    prompt = [1, 2, 3]
    loop.generate(CountingModel(), None, LastTwo(), prompt, 4)
    assert prompt == [1, 2, 3], "the caller's list changed: copy the prompt before appending to it"


@pytest.mark.task(4)
def test_the_prompt_is_checked_before_anything_is_planned(stub_choice):
    events = []
    with must_raise(UserError, "an empty prompt cannot be continued: model.config.check_prompt refuses it"):
        loop.generate(CountingModel(events), None, LastTwo(events), [], 2)
    early = [event[0] for event in events if event[0] != "check"]
    assert early == [], "check the prompt before the first plan"


@pytest.mark.task(4)
def test_the_check_knows_how_many_tokens_are_wanted(stub_choice):
    events = []
    loop.generate(CountingModel(events), None, LastTwo(events), [7, 8], 3)
    checks = [event[1:] for event in events if event[0] == "check"]
    assert checks[-1:] == [([7, 8], 3)], (
        "check_prompt must know the prompt and max_new_tokens: together they must fit the model's positions"
    )


@pytest.mark.task(4)
def test_no_new_tokens_means_no_forward_pass(stub_choice):
    model, sequence = CountingModel(), LastTwo()
    out = loop.generate(model, None, sequence, [1], 0)
    assert out == [], "max_new_tokens is 0: the answer is empty"
    assert model.fed == [], f"max_new_tokens is 0, and the model ran on {model.fed}"
    assert sequence.events == [], "max_new_tokens is 0: there is no step, so nothing is planned"


@pytest.mark.task(4)
def test_the_prompt_is_checked_even_if_no_new_tokens_are_wanted(stub_choice):
    with must_raise(UserError, "max_new_tokens is 0 and the prompt is empty: model.config.check_prompt refuses it"):
        loop.generate(CountingModel(), None, LastTwo(), [], 0)


@pytest.mark.task(2)
@pytest.mark.parametrize("count", [1, 3])
def test_without_a_cache_every_step_feeds_every_token(count):
    got = Recompute().plan([5, 6, 7][:count]).positions
    want = list(range(count))
    assert got.tolist() == want, f"without a cache, every position is fed: 0 to {count - 1}"
    assert got.dtype == torch.int64, "torch indices are int64"


@pytest.mark.task(2)
def test_the_plan_is_on_the_device_of_the_sequence():
    got = Recompute("meta").plan([5, 6, 7]).positions.device
    assert got.type == "meta", "the model is on self.device, and so must the plan be"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 63])
def test_tokens_equal_hugging_face(family, length):
    ours, hf = both(family)
    prompt = some_ids(length, ours.config.vocab_size)
    got = loop.generate(ours, NoCache(), Recompute(), prompt, 24)
    want = hf_greedy(hf, prompt, 24)
    assert got == want, f"the answers differ from new token {first_difference(got, want)} on"


def test_tokens_equal_hugging_face_after_a_thousand_tokens():
    ours, hf = both("two, tied, wide heads")
    prompt = some_ids(1000, ours.config.vocab_size)
    assert loop.generate(ours, NoCache(), Recompute(), prompt, 4) == hf_greedy(hf, prompt, 4)

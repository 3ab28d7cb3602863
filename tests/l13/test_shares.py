"""Lesson 13. A model in shares, without processes: what each rank is given, and what it is told in each step."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.errors import UserError
from mini_engine.parallel import ranks as ranks_module
from mini_engine.parallel.build import SharedRunner, parallel_engine
from mini_engine.parallel.ranks import PoolSize, follow_plans
from mini_engine.parallel.shard import bytes_per_step, share_of
from mini_engine.pocket import POCKET_DIR
from mini_engine.weights import load_model

OPTIONS = {"num_blocks": 40, "block_size": 8}
PROMPTS = [[5, 9, 11, 30] * 4, [7], [5, 9, 11, 30] * 3 + [8]]


@cache
def pocket():
    return load_model(POCKET_DIR)


def config_of(query_heads, key_heads, columns):
    """The pocket model's configuration with other numbers of heads and columns."""
    sizes = {"num_attention_heads": query_heads, "num_key_value_heads": key_heads, "intermediate_size": columns}
    return replace(pocket().config, **sizes)


# ---------------------------------------------------------------- shares, in numbers


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_share_has_its_part_of_heads_and_columns(num_ranks):
    config = config_of(8, 4, 96)
    share = share_of(config, num_ranks)
    cut = (share.num_attention_heads, share.num_key_value_heads, share.intermediate_size)
    assert cut == (8 // num_ranks, 4 // num_ranks, 96 // num_ranks)
    same = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    assert replace(share, **same) == config, "all else is whole in every rank"
    assert num_ranks * share.kv_bytes_per_token(torch.float32) == config.kv_bytes_per_token(torch.float32)


@pytest.mark.parametrize("num_ranks", [0, -1, -2, 3, 8])
def test_heads_that_cannot_be_shared_evenly_are_refused(num_ranks):
    with pytest.raises(UserError) as caught:
        share_of(config_of(8, 4, 96), num_ranks)
    told = str(caught.value)
    assert str(num_ranks) in told and all(str(possible) in told for possible in (1, 2, 4)), told


@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    [((6, 2, 96), 3), ((8, 4, 98), 4), ((8, 4, 97), 2)],
    ids=["key heads", "columns in 4", "columns in 2"],
)
def test_one_number_that_cannot_be_divided_is_enough_to_refuse(sizes, num_ranks):
    with pytest.raises(UserError) as caught:
        share_of(config_of(*sizes), num_ranks)
    digits = {word.strip(".,;") for word in str(caught.value).partition("evenly")[2].split()}
    assert "4" not in digits and "3" not in digits, f"what is offered must be possible: {caught.value}"


def test_two_vectors_a_layer_and_token_are_added_up():
    config = config_of(8, 4, 96)
    one = bytes_per_step(config, 1, 4)
    assert one == 2 * config.num_hidden_layers * config.hidden_size * 4
    assert bytes_per_step(config, 300, 4) == 300 * one, "prefill sends a vector for every token"
    assert bytes_per_step(config, 1, 2) == one // 2, "bfloat16 is half of it"
    assert bytes_per_step(share_of(config, 4), 1, 4) == one, "vectors are whole: more ranks do not make them shorter"


# ---------------------------------------------------------------- the same step everywhere


class Wire:
    """Ranks without processes: keeps what rank 0 sends. Its model is whole, so rank 0 alone computes all of it."""

    def __init__(self, model=None):
        self.model = model or pocket()
        self.config = self.model.config
        self.sent = []
        self.lost = ""

    def send(self, message):
        if self.lost:
            raise RuntimeError("connection closed by peer")
        self.sent.append(message)

    def as_error(self, error):
        return UserError(f"{self.lost}, after {error}")


def answers(engine, **params):
    """Answer all prompts together; return their tokens."""
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True} | params)
    requests = [engine.add_request(str(i), ids, chosen) for i, ids in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.output_ids for request in requests]


def follow(monkeypatch, messages, model):
    """Let another rank take these messages."""
    left = iter([*messages, None])
    monkeypatch.setattr(ranks_module, "receive", lambda: next(left))
    assert follow_plans(model, model.config) is None
    assert next(left, "all taken") == "all taken", "None comes last"


class Noting:
    """A model that notes what it is fed, and the pool that it writes to."""

    def __init__(self):
        self.model, self.config = pocket(), pocket().config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.fed, self.pools = [], []

    def __call__(self, token_ids, pool, meta, rows):
        self.fed.append(token_ids.tolist())
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        return self.model(token_ids, pool, meta, rows=rows)


def test_rank_0_gives_the_tokens_of_one_process():
    wire = Wire()
    assert answers(parallel_engine(wire, **OPTIONS)) == answers(Engine.for_model(pocket(), **OPTIONS))


def test_each_step_is_sent_once_and_before_rank_0_runs_it():
    order, model = [], Noting()

    class Told(Wire):
        def send(self, message):
            super().send(message)
            order.append("sent")

    class Ordered(Noting):
        def __call__(self, token_ids, *args, **more):
            order.append("run")
            return super().__call__(token_ids, *args, **more)

    wire = Told()
    engine = parallel_engine(wire, **OPTIONS)
    assert isinstance(wire.sent[0], PoolSize) and isinstance(engine.runner, SharedRunner)
    order.clear()
    engine.runner.model = model = Ordered()
    answers(engine)
    assert order == ["sent", "run"] * len(model.fed), "the others wait in receive, and rank 0 in its first all-reduce"
    assert [step.token_ids.tolist() for step in wire.sent[1:]] == model.fed


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 1.5, "seed": 3}])
def test_another_rank_feeds_what_rank_0_chose(monkeypatch, params):
    wire, other = Wire(), Noting()
    engine = parallel_engine(wire, **OPTIONS)
    answers(engine, **params)
    follow(monkeypatch, wire.sent, other)
    assert other.fed == [step.token_ids.tolist() for step in wire.sent[1:]], (
        "a rank that chooses for itself feeds other tokens, and adds up parts of two different texts"
    )
    slots = torch.cat([step.meta.slot_mapping for step in wire.sent[1:]])
    for mine, theirs in zip(engine.runner.pool.K, other.pools[0].K, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots])


def test_another_rank_makes_the_pool_that_it_is_told(monkeypatch):
    wire, other = Wire(), Noting()
    for num_blocks in (40, 20):
        answers(parallel_engine(wire, num_blocks=num_blocks, block_size=8))
    follow(monkeypatch, wire.sent, other)
    assert [pool.K[0].shape[0] for pool in other.pools] == [40, 20], "a new size means a new, empty pool"


def test_another_rank_ends_when_it_is_told(monkeypatch):
    follow(monkeypatch, [], Noting())


def test_a_rank_that_is_gone_is_one_clear_error():
    wire = Wire()
    engine = parallel_engine(wire, **OPTIONS)
    engine.add_request("0", PROMPTS[0], SamplingParams(max_tokens=4))
    wire.lost = "rank 1 of 2 has ended"
    chunks = engine.scheduler.schedule()
    with pytest.raises(UserError) as caught:
        engine.runner.run(chunks)
    assert "rank 1 of 2 has ended" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


def test_a_rank_that_is_lost_within_the_step_is_the_same_error():
    wire = Wire()
    engine = parallel_engine(wire, **OPTIONS)
    engine.add_request("0", PROMPTS[0], SamplingParams(max_tokens=4))

    def lose(*args, **more):
        wire.lost = "rank 1 of 2 has ended"
        raise RuntimeError("connection closed by peer")

    engine.runner.model = lose
    with pytest.raises(UserError) as caught:
        engine.runner.run(engine.scheduler.schedule())
    assert "rank 1 of 2 has ended" in str(caught.value)

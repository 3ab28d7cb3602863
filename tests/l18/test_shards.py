"""Lesson 18. Each rank's share of the weights: half of every matrix, and together the tokens of the whole model.

The ranks are threads here; they add up over a barrier instead of a process group.
"""

import re
from functools import cache

import pytest
import torch

from mini_engine.assembly.build import assemble, build_engine
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.checkpoint import stored
from mini_engine.distributed.tensor_parallel.shard import (
    bytes_per_step,
    gathered_bytes_per_step,
    share_of,
    shared_by,
)
from mini_engine.kv.no_cache import NoCache, Recompute
from tests.l18.ranks import answers, in_threads, part
from tests.l18.shapes import TIED, UNTIED, each_shape, load, path_of
from tests.support import refused

OPTIONS = {"num_blocks": 60, "block_size": 8, "kernel": "torch"}
PROMPTS = [[5, 9, 11, 30] * 6, [7], list(range(20, 60)), [0, 65, 66, 129, 130]]

# What joins the ranks' parts of a parameter: the first words that its name has.
JOINED = (
    (r"(o_proj|down_proj|out_proj)\.bias", "added"),
    (r"o_proj|down_proj|out_proj", "side by side"),
    (r"in_proj_qkv|conv1d", "three parts"),
    (r"in_proj\.", "thirds"),
    (r"norm|q_a_proj|kv_a_proj", "copied"),
    (r"embed_tokens|lm_head", "padded"),
    (r"[qkv]_proj|[qv]_b_proj|gate_proj|up_proj|in_proj_[zba]|A_log|dt_bias|conv", "one below the other"),
)


@cache
def whole(name):
    return load(name)


def parts_of(name, num_ranks):
    """Return each rank's parameters."""
    return [dict(part(path_of(name), rank, num_ranks).named_parameters()) for rank in range(num_ranks)]


def how_joined(name):
    return next(how for words, how in JOINED if re.search(words, name))


def joined(name, parts, config, num_ranks):
    """Return the parameter that the parts of all ranks make up."""
    how = how_joined(name)
    if how == "added":
        return torch.stack(parts).sum(0)
    if how == "side by side":
        return torch.cat(parts, dim=1)
    if how in ("three parts", "thirds"):
        whole = (1, 1, 1) if how == "thirds" else (config.key_dim, config.key_dim, config.value_dim)
        sizes = [size * len(parts[0]) // sum(whole) for size in whole]
        return torch.cat([torch.cat(same) for same in zip(*(one.split(sizes) for one in parts), strict=True)])
    if how == "copied":
        assert all(torch.equal(one, parts[0]) for one in parts), f"all ranks have the same {name}"
        return parts[0]
    together = torch.cat(parts)
    if how == "padded":
        rest = together[config.vocab_size :]
        assert not rest.any() and len(rest) < num_ranks, (
            "after the last token's row there are zeros, as few as it takes"
        )
        return together[: config.vocab_size]
    return together


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@each_shape
def test_the_parts_of_all_ranks_are_the_whole_model_bit_for_bit(name, num_ranks, monkeypatch):
    config = whole(name).config
    monkeypatch.setattr(stored, "PIECE_BYTES", 2**11)  # several pieces for most of them
    if config.num_key_value_heads % num_ranks:
        pytest.skip("its key heads cannot be shared by so many")
    parts = parts_of(name, num_ranks)
    for parameter, weight in whole(name).named_parameters():
        found = joined(parameter, [one[parameter] for one in parts], config, num_ranks)
        assert torch.equal(found, weight), f"the ranks' parts of {parameter} do not make up the whole"
    assert parts[0].keys() == dict(whole(name).named_parameters()).keys()


@pytest.mark.parametrize("num_ranks", [1, 2])
@each_shape
def test_each_rank_holds_its_share(name, num_ranks):
    """Memory of its own: a view of the whole matrix would keep all of it."""
    for parameter, mine in parts_of(name, num_ranks)[-1].items():
        weight, how = whole(name).get_parameter(parameter), how_joined(parameter)
        rows = -(-len(weight) // num_ranks) if how == "padded" else len(weight)
        each = num_ranks if how in ("side by side", "three parts", "thirds", "one below the other") else 1
        assert mine.numel() == rows * weight[0].numel() // each, parameter
        assert mine.untyped_storage().nbytes() == mine.nbytes, f"{parameter} keeps more than its share"


@each_shape
def test_a_rank_s_config_is_its_share_with_the_whole_vocabulary(name):
    config = whole(name).config
    assert part(path_of(name), 1, 2).config == share_of(config, 2, shared_by(config))


@pytest.mark.parametrize(
    ("name", "num_ranks", "values"),
    [("every third, four value heads a key head, wide keys", 2, "2"), ("interleaved", 3, "1, 2, 4")],
    ids=["one key head in the delta nets", "latents of four heads"],
)
def test_heads_that_cannot_be_shared_evenly_are_refused(name, num_ranks, values):
    path = path_of(name)
    with refused(UserError, values):
        part(path, 0, num_ranks)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("family", "num_ranks"), [(TIED, 4), ("one query a key head, untied", 4), ("every fourth attends", 2)]
)
def test_ranks_give_the_tokens_of_the_whole_model(family, num_ranks):
    expected = answers(build_engine(load(family), backend="reference", **OPTIONS), PROMPTS)
    work = lambda model: answers(assemble(model, EngineConfig(**OPTIONS)), PROMPTS)  # noqa: E731
    assert in_threads(path_of(family), num_ranks, "auto", work) == [expected] * num_ranks


@torch.inference_mode()
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [UNTIED, TIED])
def test_the_bytes_of_a_step_are_those_of_the_formulas(name, num_ranks):
    ids, config = torch.tensor([0, 32, 33, 65, 66, 130]), whole(name).config

    def work(model):
        model(ids, NoCache(), Recompute().plan(ids.tolist()))
        return model.lm_head.collectives.traffic

    gathered = gathered_bytes_per_step(config, len(ids), 4, num_ranks)
    for traffic in in_threads(path_of(name), num_ranks, "reference", work):
        assert traffic.calls == 2 * config.num_hidden_layers + 1 + 1, "all-reduces, and one gather"
        assert traffic.bytes == bytes_per_step(config, len(ids), 4) + gathered

"""Lesson 13. Each rank's share of the weights: half of every matrix, and together the tokens of the whole model.

The ranks are threads here; they add up over a barrier instead of a process group.
"""

import pytest

from mini_engine.build import assemble, build_engine
from mini_engine.checkpoint.weights import load_model
from mini_engine.distributed.ranks.shard import shard
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine_config import EngineConfig
from mini_engine.errors import UserError
from mini_engine.hybrid.weights import load_hybrid
from mini_engine.pocket import POCKET_DIR
from mini_engine.pocket_hybrid import POCKET_HYBRID_DIR
from tests.l11 import models
from tests.l13.ranks import in_threads
from tests.support import checkpoint, must_raise

QWEN3 = ("two, tied, wide heads", "four, with biases")
FAST = [pytest.param(name, marks=pytest.mark.reference) for name in ("torch", "packed")]  # given, and tested in full
HYBRID = ("every fourth attends", "every second, one value head a key head, tied", "one delta net, last")
OPTIONS = {"num_blocks": 60, "block_size": 8, "kernel": "torch"}
PROMPTS = [[5, 9, 11, 30] * 6, [7], list(range(20, 60))]


def load(family):
    """Load a fresh copy of a checkpoint; fast layers take a model's weights."""
    return load_hybrid(models.checkpoint(family)) if family in HYBRID else load_model(checkpoint(family))


def answers(engine):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [engine.add_request(str(i), ids, params) for i, ids in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("family", [*QWEN3, *HYBRID])
def test_two_ranks_give_the_tokens_of_the_whole_model(family, backend):
    expected = answers(build_engine(load(family), backend="reference", **OPTIONS))
    work = lambda model: answers(assemble(model, EngineConfig(**OPTIONS), None))  # noqa: E731
    first, second = in_threads(lambda: load(family), 2, backend, work)
    assert first == expected, "the parts of both ranks make up the whole"
    assert second == first, "both ranks have the same sums"


def test_four_ranks_give_them_too():
    family = "one query a key head, untied"
    expected = answers(build_engine(load(family), backend="reference", **OPTIONS))
    work = lambda model: answers(assemble(model, EngineConfig(**OPTIONS), None))  # noqa: E731
    assert in_threads(lambda: load(family), 4, "auto", work) == [expected] * 4


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("path", [POCKET_DIR, POCKET_HYBRID_DIR], ids=["Qwen3", "hybrid"])
def test_each_rank_holds_its_share(path, num_ranks):
    """Memory of its own: a view of the whole matrix would keep all of it."""
    model = load_model(path) if path == POCKET_DIR else load_hybrid(path)
    cut = {name for name, _ in model.named_parameters() if is_cut(name)}
    for name, part in shard(model, num_ranks - 1, num_ranks).named_parameters():
        whole = model.get_parameter(name)
        assert part.numel() == whole.numel() // (num_ranks if name in cut else 1), name
        assert name not in cut or part.untyped_storage().nbytes() == part.nbytes, f"{name} keeps more than its share"


def is_cut(name):
    """Whether ranks share a parameter: all matrices of the layers, the convolution, and what each head has."""
    words = ("_proj", "in_proj", "conv1d", "A_log", "dt_bias")
    return any(word in name for word in words)


def test_heads_of_a_hybrid_that_cannot_be_shared_evenly_are_refused():
    with must_raise(UserError, "a hybrid with one key head in its delta nets cannot be shared by two ranks"):
        shard(load_hybrid(models.checkpoint("every third, four value heads a key head, wide keys")), 0, 2)

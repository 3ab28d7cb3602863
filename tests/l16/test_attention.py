"""Lesson 16. The walk over blocks of latents: each latent is read once for all heads, and nothing is gathered."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mini_engine.latents.attention import attend_blocks
from mini_engine.latents.contract import as_it_is
from tests.shared.new_memory import NewMemory
from tests.shared.small_latents import (
    BLOCK_SIZE,
    HEADS,
    RANK,
    ROPE,
    close,
    over_latents,
    pack,
    pool_of,
    randoms,
    unpack,
)

task = pytest.mark.task(6)
SCALE = 0.3


def queries(count, heads=HEADS, rank=RANK, rope=ROPE):
    return randoms((count, heads, rank), (count, heads, rope), seed=2)


def walk(pool, q, q_rope, kv_len, scale=SCALE, blocks=None, widen=as_it_is):
    blocks = pool.table[0].tolist() if blocks is None else blocks
    try:
        return attend_blocks(q, q_rope, pool.c_cache, pool.r_cache, blocks, kv_len, scale, widen)
    except IndexError as error:
        error.add_note(
            f"the table is {blocks}, and {kv_len} latents are in blocks of {BLOCK_SIZE}: follow no entry after those"
        )
        raise


def oracle(q, q_rope, c, r, scale=SCALE):
    return over_latents(*(x.double() for x in (q, q_rope, c, r)), scale)


def check(q_len, kv_len, teach, **options):
    pool, (q, q_rope) = pool_of([(q_len, kv_len)]), queries(q_len, **options)
    out = walk(pool, q, q_rope, kv_len)
    assert not out.isnan().any(), f"{teach}: NaN, which every slot holds that is not this sequence's: slice, then score"
    wide = f"{teach}: a sum of latents is as wide as they are; rotary keys are in the scores only"
    assert list(out.shape) == [q_len, q.shape[1], RANK], wide
    c, r = pool.histories[0]
    zeros, every = torch.zeros_like(q_rope), torch.cat((q, q.new_zeros(kv_len - q_len, *q.shape[1:])))
    guesses = {
        "rotary keys are not in the scores": oracle(q, zeros, c, r),
        "q · c is not in the scores": oracle(torch.zeros_like(q), q_rope, c, r),
        "scores are not scaled": oracle(q, q_rope, c, r, 1.0),
        "only q · c is scaled": oracle(q, q_rope / SCALE, c, r),
        "only q_rope · r is scaled": oracle(q / SCALE, q_rope, c, r),
        "every query saw all latents, later tokens' too": torch.cat(
            [oracle(q[i : i + 1], q_rope[i : i + 1], c, r) for i in range(q_len)]
        ),
        "query i saw latents 0 … i, as if nothing came before": oracle(
            every, torch.cat((q_rope, q_rope.new_zeros(kv_len - q_len, *q_rope.shape[1:]))), c, r
        )[:q_len],
    }
    close(out, oracle(q, q_rope, c, r), teach, guesses)


@task
@pytest.mark.parametrize("kv_len", [3, 4, 5, 9, 12, 1])
def test_a_decode_sees_its_whole_history(kv_len):
    check(1, kv_len, f"one query over {kv_len} latents in blocks of {BLOCK_SIZE}: scale * (q · c + q_rope · r)")


@task
@pytest.mark.parametrize("q_len, kv_len", [(4, 4), (7, 7), (2, 9), (5, 6), (9, 21)])
def test_queries_behind_a_history_see_what_is_before_them(q_len, kv_len):
    check(q_len, kv_len, f"query i of {q_len} over {kv_len} latents sees latents 0 … {kv_len - q_len} + i")


@task
@pytest.mark.parametrize("heads", [1, 2, 16])
def test_any_number_of_heads_shares_one_latent(heads):
    check(2, 9, f"{heads} heads over the same latents", heads=heads)


class Reads(TorchFunctionMode):
    """Within it, `of` counts the numbers that operations read out of tensors in this memory; views read nothing."""

    COPIES = ("__getitem__", "index_select", "gather", "take", "embedding")  # these read no more than they return

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.memory, self.of = cache.untyped_storage().data_ptr(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not self.is_here(result):
            given = [x for x in self.flat([*args, *(kwargs or {}).values()]) if self.is_here(x)]
            copied = func.__name__ in self.COPIES
            self.of += sum(min(x.numel(), result.numel()) if copied else x.numel() for x in given)
        return result

    def is_here(self, x) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == self.memory

    def flat(self, values):
        for x in values:
            if isinstance(x, list | tuple):
                yield from self.flat(x)
            else:
                yield x


@task
@pytest.mark.parametrize("heads", [1, 16])
def test_latents_are_read_for_all_heads_at_once(heads):
    pool, (q, q_rope) = pool_of([(1, 12)]), queries(1, heads)
    for name, cache, uses in (("latent", pool.c_cache, 2), ("rotary key", pool.r_cache, 1)):
        with Reads(cache) as reads:
            walk(pool, q, q_rope, 12)
        times, once = reads.of / (12 * cache.shape[3]), "scores, and once for its sums" if uses == 2 else "scores"
        assert times <= uses, f"{heads} heads: a {name} is used once for all heads' {once}; none is copied for a head"


@task
def test_each_latent_is_widened_once():
    pool, (q, q_rope), widened = pool_of([(3, 10)]), queries(3), {RANK: 0, ROPE: 0}

    def widen(rows, dim, dtype):
        widened[dim] += rows[..., 0].numel()
        return rows

    walk(pool, q, q_rope, 10, widen=widen)
    assert widened[RANK] == 10, "10 latents, each passed to `widen` once: for all heads, for scores and for sums"
    assert widened[ROPE] == 10, "10 rotary keys, each passed to `widen` once"


@task
def test_rows_are_widened():
    pool = pool_of([(3, 10)], pack=lambda x, dim, dtype: pack(x.nan_to_num()))
    q, q_rope = queries(3)
    out = walk(pool, q, q_rope, 10, widen=unpack)
    c, r = (unpack(pack(x), x.shape[1]) for x in pool.histories[0])
    close(out, oracle(q, q_rope, c, r), "of rows, `widen(rows, dim, dtype)` makes the vectors that are attended to")


@task
@pytest.mark.parametrize("entry", [-1, 10_000])
def test_entries_past_the_needed_blocks_are_not_followed(entry):
    pool, (q, q_rope) = pool_of([(1, 8)]), queries(1)
    needed = pool.table[0, :2].tolist()
    teach = f"8 latents are in two blocks of 4; the entries after them are {entry}: stop before them"
    try:
        out = walk(pool, q, q_rope, 8, blocks=[*needed, entry, entry])
    except (IndexError, RuntimeError) as error:
        error.add_note(teach)
        raise
    close(out, oracle(q, q_rope, *pool.histories[0]), teach)


@task
def test_a_needed_block_that_is_not_in_the_cache_is_refused():
    pool, (q, q_rope) = pool_of([(1, 12)]), queries(1)
    first, _, last, *_ = pool.table[0].tolist()
    for wrong in (-1, 10_000):
        try:
            walk(pool, q, q_rope, 12, blocks=[first, wrong, last])
        except IndexError:
            continue
        raise AssertionError(f"the second of three blocks is {wrong}: raise IndexError; torch takes -1 for the last")


@task
def test_a_later_block_with_larger_scores_rescales_the_sums():
    pool, (q, q_rope) = pool_of([(1, 12)]), queries(1)
    for strength in (torch.arange(12.0), torch.arange(12.0).flip(0)):
        c = pool.histories[0][0] + q[0].mean(0) * strength[:, None]
        pool.c_cache[pool.table[0, :3].long()] = c.view(3, BLOCK_SIZE, 1, RANK)
        want = oracle(64 * q, q_rope, c, pool.histories[0][1])
        close(walk(pool, 64 * q, q_rope, 12), want, "large scores that rise or fall: RunningSums keeps count of them")


@task
def test_the_answer_is_float32_and_the_inputs_stay():
    pool, (q, q_rope) = pool_of([(2, 9)]), queries(2)
    before = [x.clone() for x in (q, q_rope, pool.c_cache, pool.r_cache)]
    out = walk(pool, q, q_rope, 9)
    assert out.dtype == torch.float32, "sums are in float32"
    assert list(out.shape) == [2, HEADS, RANK], "a weighted sum of latents for each query and head"
    after = zip(("q", "q_rope", "c_cache", "r_cache"), before, (q, q_rope, pool.c_cache, pool.r_cache), strict=True)
    changed = [name for name, x, y in after if not torch.equal(x.nan_to_num(), y.nan_to_num())]
    assert changed == [], "attention writes to nothing but its own answer"
    rounded = [x.bfloat16() for x in before]
    out = attend_blocks(*rounded, pool.table[0].tolist(), 9, SCALE)
    assert out.dtype == torch.float32, "bfloat16 in, float32 out: scores and sums are not rounded on the way"
    c, r = (x.bfloat16() for x in pool.histories[0])
    close(out, oracle(*rounded[:2], c, r), "of bfloat16 latents, computed in float32", within=1e-4)


@task
def test_no_copy_of_the_history_is_made():
    kv_len, rank, rope = 512, 64, 16
    pool, (q, q_rope) = pool_of([(1, kv_len)], rank, rope), queries(1, 2, rank, rope)
    with NewMemory(pool.c_cache, pool.r_cache, q, q_rope) as new:
        walk(pool, q, q_rope, kv_len)
    latents = kv_len * rank * 4  # bytes
    assert new.peak < latents / 4, (
        f"{new.peak // 1024} KiB were allocated at one time, and all the latents are {latents // 1024} KiB: walk over "
        "the blocks and use each where it lies"
    )

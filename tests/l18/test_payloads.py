"""Lesson 18. Lesson 12's payloads over ranks: what several write, one process reads, and the other way round."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.assembly.layout import kv_shape
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.distributed.tensor_parallel.messages import ReadBlocks, WriteBlocks
from mini_engine.distributed.tensor_parallel.payloads import Run, join, split
from mini_engine.distributed.tensor_parallel.pools import SharedPools
from mini_engine.distributed.tensor_parallel.shard import share_of, shared_by
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.hybrid_config import LINEAR, HybridConfig
from mini_engine.kv.block_tensor import KvPool
from mini_engine.model.kinds import FULL
from mini_engine.tiers.blocks import BlockBytes
from tests.l18.ranks import Wire
from tests.shared.small_latents import config_of
from tests.support import must_raise

SIZES = dict(vocab_size=32, hidden_size=24, num_attention_heads=8, num_key_value_heads=4, head_dim=6)
CONFIG = HybridConfig(
    **SIZES,
    intermediate_size=16,
    num_hidden_layers=3,
    layer_types=(LINEAR, FULL, LINEAR),
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
    rotary_dim=2,
)
BLOCKS = [3, 1]
each_number = pytest.mark.parametrize("num_ranks", [1, 2, 4])
each_kind = pytest.mark.parametrize("kind", ["kv", "states"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Others(Wire):
    """Ranks in this process: each message is carried out by the pools of the others."""

    def __init__(self, num_ranks, memories):
        self.num_ranks, self.memories = num_ranks, memories
        self.model = type("Model", (), {"config": share_of(CONFIG, num_ranks, shared_by(CONFIG))})

    def tell(self, message):
        for memory in self.memories:
            message.carry_out(memory)

    def tell_each(self, messages):
        for memory, message in zip(self.memories, messages, strict=True):
            message.carry_out(memory)

    def ask(self, message, num_bytes):
        answers = [message.carry_out(memory) for memory in self.memories]
        assert all(len(answer) == num_bytes for answer in answers)
        return answers


class Pools:
    """One rank's pools, as messages see them."""

    def __init__(self, kv, states):
        self.kv, self.states = kv, states
        self.pools = {"kv": kv, "states": states}


def pools_of(config: Qwen3Config, dtype) -> Pools:
    kv = KvPool(kv_shape(config), 5, 2, lambda *_: None, dtype)
    pools = Pools(kv, GdnPool.for_model(config, 2, dtype=dtype, max_track_slots=1))
    for tensor in tensors_of(pools):
        tensor.zero_()
    return pools


def tensors_of(pools):
    return *pools.kv.K, *pools.kv.V, pools.states.recurrent_state, pools.states.conv_state


def filled(dtype) -> Pools:
    """Return pools of the whole model, full of random numbers."""
    torch.manual_seed(0)
    pools = pools_of(CONFIG, dtype)
    for tensor in tensors_of(pools):
        tensor.normal_()
    return pools


def cut(whole: Pools, num_ranks, dtype) -> list[Pools]:
    """Return each rank's pools, with its heads of the whole ones."""
    parts = [pools_of(share_of(CONFIG, num_ranks, shared_by(CONFIG)), dtype) for _ in range(num_ranks)]
    qkv = whole.states.conv_state.split([CONFIG.key_dim, CONFIG.key_dim, CONFIG.value_dim], dim=2)
    for rank, part in enumerate(parts):
        for mine, all_heads in zip((*part.kv.K, *part.kv.V), (*whole.kv.K, *whole.kv.V), strict=True):
            mine.copy_(all_heads.chunk(num_ranks, dim=2)[rank])
        part.states.recurrent_state.copy_(whole.states.recurrent_state.chunk(num_ranks, dim=2)[rank])
        part.states.conv_state.copy_(torch.cat([x.chunk(num_ranks, dim=2)[rank] for x in qkv], dim=2))
    return parts


def shared(num_ranks, parts):
    """Return the pools of all ranks, as rank 0 sees them, and its own."""
    return SharedPools(Others(num_ranks, parts[1:])), parts[0]


def rows(*payloads):
    """Payloads of one size as `[n, bytes]`."""
    return torch.tensor([list(payload) for payload in payloads], dtype=torch.uint8)


# a block of two tokens, two heads in each of two ranks; a head has one byte: its name
TOKENS = [Run(times=2, pieces=[2])]
HEADS = rows(b"abcdABCD", b"efghEFGH"), [rows(b"abAB", b"efEF"), rows(b"cdCD", b"ghGH")]
# a channel of queries, keys and values, three bytes of each in one process of three: q, k and twice as much of v
CHANNELS = [Run(times=1, pieces=[1, 1, 2])]
PARTS = rows(b"qQjkKlvwVWxy"), [rows(b"qkvw"), rows(b"QKVW"), rows(b"jlxy")]


@pytest.mark.task(6)
@pytest.mark.parametrize(("layout", "case"), [(TOKENS, HEADS), (CHANNELS, PARTS)], ids=["heads", "parts"])
def test_parts_are_put_together_piece_by_piece(layout, case):
    whole, parts = case
    assert text(join(parts, layout)) == text(whole), "of each token, the heads of rank 0, then those of rank 1, …"


@pytest.mark.task(6)
@pytest.mark.parametrize(("layout", "case"), [(TOKENS, HEADS), (CHANNELS, PARTS)], ids=["heads", "parts"])
def test_a_payload_is_taken_apart_piece_by_piece(layout, case):
    whole, parts = case
    found = [text(part) for part in split(whole, layout, len(parts))]
    assert found == [text(part) for part in parts], "each rank gets its heads of every token"


@pytest.mark.task(6)
def test_runs_follow_one_another():
    """K of a block, then V, whose heads have another size."""
    layout = [Run(2, [1]), Run(2, [2])]
    whole, parts = rows(b"aAbBxxXXyyYY"), [rows(b"abxxyy"), rows(b"ABXXYY")]
    assert text(join(parts, layout)) == text(whole), "the first run of all ranks, then the second of all ranks"
    assert [text(part) for part in split(whole, layout, 2)] == [text(part) for part in parts]


@pytest.mark.task(6)
def test_one_rank_has_everything():
    whole = rows(b"abcdABCD")
    assert text(join([whole], [Run(2, [4])])) == text(whole)
    assert [text(part) for part in split(whole, [Run(2, [4])], 1)] == [text(whole)]


def text(payloads):
    return [bytes(row.tolist()).decode() for row in payloads]


def bytes_of(pools, own, kind):
    return pools.block_bytes(own.kv) if kind == "kv" else pools.state_bytes(own.states)


@each_number
@each_dtype
@each_kind
def test_ranks_read_a_block_as_one_process_does(kind, num_ranks, dtype):
    whole = filled(dtype)
    pools, own = shared(num_ranks, cut(whole, num_ranks, dtype))
    blocks, expected = bytes_of(pools, own, kind), BlockBytes(*getattr(whole, kind).parts)
    assert blocks.payload_bytes == expected.payload_bytes
    assert list(map(bytes, blocks.read(BLOCKS))) == list(map(bytes, expected.read(BLOCKS))), (
        "the heads of all ranks in the order of one process: otherwise a cache is of use to one number of ranks only"
    )


def test_payloads_of_another_size_are_refused_and_nothing_is_written():
    whole = filled(torch.float32)
    parts = cut(whole, 2, torch.float32)
    pools, own = shared(2, parts)
    blocks, slots = pools.block_bytes(own.kv), pools.state_bytes(own.states)
    payload, before = bytes(blocks.read([1])[0]), [part.kv.K[0].clone() for part in parts]
    for wrong in ([payload], [payload, payload[:-1]], [payload] * 3):
        with must_raise(ValueError, "two blocks need two payloads of one size"):
            blocks.write(BLOCKS, wrong)
    with must_raise(ValueError, "a state has one size"):
        slots.write([1], [bytes(slots.payload_bytes + 1)])
    assert all(torch.equal(part.kv.K[0], old) for part, old in zip(parts, before, strict=True))


def test_what_ranks_are_asked_says_nothing_of_the_bytes_of_others():
    """Each rank gets its own part alone: a rank that got all would be sent num_ranks times as much."""
    sent = []

    class Noting(Others):
        def tell_each(self, messages):
            sent.extend(messages)

    parts = cut(filled(torch.float32), 2, torch.float32)
    ranks = Noting(2, parts[1:])
    pools = SharedPools(ranks)
    blocks, slots = pools.block_bytes(parts[0].kv), pools.state_bytes(parts[0].states)
    blocks.write(BLOCKS, blocks.read(BLOCKS))
    slots.write([1], slots.read([1]))
    (written, state) = sent
    assert isinstance(written, WriteBlocks) and isinstance(state, WriteBlocks)
    assert sum(map(len, written.payloads)) == blocks.payload_bytes, "two blocks, half of each"
    assert sum(map(len, state.payloads)) == slots.payload_bytes // 2
    assert ReadBlocks("kv", BLOCKS).carry_out(parts[1]) == b"".join(map(bytes, written.payloads))
    assert ReadBlocks("states", [1]).carry_out(parts[1]) == state.payloads[0]


def test_every_rank_has_the_whole_record_of_latents():
    """A rank attends over all latents, so it needs them; what rank 0 has it need not ask for."""
    config = config_of()
    pools = [KvPool(config, 5, 4, lambda *_: None) for _ in range(4)]
    ranks = Others(4, [Pools(pool, None) for pool in pools[1:]])
    ranks.model, ranks.ask = SimpleNamespace(config=config), None
    blocks = SharedPools(ranks).block_bytes(pools[0])
    payload = bytes(range(256)) * (blocks.payload_bytes // 256) + bytes(blocks.payload_bytes % 256)
    blocks.write([3], [payload])
    assert bytes(blocks.read([3])[0]) == payload
    for pool in pools[1:]:
        assert bytes(BlockBytes(*pool.parts).read([3])[0]) == payload, "each rank gets all of it"

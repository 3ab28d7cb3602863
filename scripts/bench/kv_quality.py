"""Course machinery. Measures the effect of a compressed KV pool on predictions: NLL and KL against full precision.

A text is run in one step, and every token attends to keys and values as the pool returns them, its own included.
Comparing tokens would show nothing: with wide margins, a model chooses the same ones from far worse K and V.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.pocket.chats import TURN_END, ask
from scripts.pocket.held_out import held_out_lines

import torch
from torch import Tensor

from lessons.l17_bits.judge import kl, nll
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.qwen3 import qwen3_model
from mini_engine.pocket import POCKET_DIR
from mini_engine.quantized.formats import FORMATS
from mini_engine.quantized.pool import RowKvPool
from mini_engine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
PIECE = 512  # tokens of one text cut from a file
OUTLIER = 16.0  # the size of one channel of every key relative to the others
STD = 0.1
RANDOM = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)


class Quality(NamedTuple):
    """The quality of predictions with a pool, over all tokens of some texts.

    nll: mean negative log likelihood of the texts' own tokens, in nats. kl: mean KL divergence from full precision's
    distribution, in nats. worst: the largest KL divergence at one token.
    """

    nll: float
    kl: float
    worst: float


class PlainInt4KvPool(KvPool):
    """The bad example: K and V rounded to 16 levels between the least and the largest number of a token and head."""

    direct = False

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write as in lesson 3, rounded first."""
        super().set_kv(layer, slot_mapping, to_16_levels(k), to_16_levels(v))


class Fp8KvPool(KvPool):
    """The other 8 bits: K and V rounded to float8_e4m3fn, with a scale for each token and head, like int8."""

    direct = False

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write as in lesson 3, rounded first."""
        super().set_kv(layer, slot_mapping, to_fp8(k), to_fp8(v))


def to_fp8(x: Tensor) -> Tensor:
    """Return x `[..., D]` with each vector rounded to the levels of float8_e4m3fn, in x's dtype."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def to_16_levels(x: Tensor) -> Tensor:
    """Return x `[..., D]` with each vector rounded to 16 evenly spaced numbers, in x's dtype."""
    least, largest = x.aminmax(dim=-1, keepdim=True)
    step = ((largest - least) / 15).clamp_min(torch.finfo(x.dtype).tiny)
    return ((x - least) / step).round() * step + least


def pools(model: CausalLM, num_blocks: int) -> dict[str, KvPool]:
    """Return a pool of each kind for a model, read by torch's kernels."""
    config, plain = model.config, load_kernel("torch", model.device, model.dtype)
    usual = (config, num_blocks, BLOCK_SIZE, plain, model.dtype, model.device)
    found: dict[str, KvPool] = {"full": KvPool(*usual), "plain int4": PlainInt4KvPool(*usual), "fp8": Fp8KvPool(*usual)}
    for name, rows in FORMATS.items():
        kernel = load_kernel("torch", model.device, model.dtype, rows.name)
        found[name] = RowKvPool(rows, config, num_blocks, BLOCK_SIZE, kernel, model.device)
    return found


def compare(model: CausalLM, texts: Sequence[list[int]]) -> dict[str, Quality]:
    """Return the quality of each kind of pool over some texts; "full" is the reference."""
    num_blocks = 1 + sum(-(-len(ids) // BLOCK_SIZE) for ids in texts)
    found = {name: logits_of(model, texts, pool) for name, pool in pools(model, num_blocks).items()}
    return {name: quality(found["full"], other, texts) for name, other in found.items()}


@torch.inference_mode()
def logits_of(model: CausalLM, texts: Sequence[list[int]], pool: KvPool) -> Tensor:
    """Return the predictions after each token of each text: logits `[T, vocab_size]`, on the CPU."""
    allocator = BlockAllocator(pool.num_blocks, BLOCK_SIZE)
    requests = [PackedRequest(ids, BlockTable(allocator)) for ids in texts]
    reserve_all(requests)
    token_ids = torch.tensor([token for ids in texts for token in ids], device=pool.device)
    return model(token_ids, pool, plan_packed(requests, BLOCK_SIZE, pool.device)).cpu()


def quality(full: Tensor, other: Tensor, texts: Sequence[list[int]]) -> Quality:
    """Compare two results of `logits_of`."""
    divergence = kl(full, other)
    ends = torch.tensor([len(ids) for ids in texts]).cumsum(0) - 1
    before = torch.ones(len(full), dtype=torch.bool).index_fill(0, ends, False)  # tokens that have a next one
    following = torch.tensor([token for ids in texts for token in ids[1:]])
    return Quality(float(nll(other[before], following).mean()), float(divergence.mean()), float(divergence.max()))


# ---------------------------------------------------------------- models and texts


@functools.cache
def held_out(most: int | None = None) -> tuple[CausalLM, list[list[int]]]:
    """Return the pocket model, and the first `most` phrasings of facts that its training text left out."""
    tokenizer = Tokenizer.load(POCKET_DIR)
    lines = held_out_lines()[:most]
    texts = [
        ask(line.prompt) + line.answer + TURN_END if line.is_question else line.prompt + line.answer for line in lines
    ]
    return load_model(POCKET_DIR), [tokenizer.encode(text) for text in texts]


def text_of(path: Path) -> tuple[CausalLM, list[list[int]]]:
    """Return the pocket model, and a file's text in pieces: text unlike the training text.

    Raises:
        UserError: the file cannot be read as UTF-8, or has no two tokens.
    """
    try:
        ids = Tokenizer.load(POCKET_DIR).encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the text {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(ids) < 2:
        raise UserError(f"the text {path} has {len(ids)} tokens; give one with at least 2")
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
    return load_model(POCKET_DIR), pieces


@functools.cache
def heavy_tailed(seed: int = 0, num_texts: int = 8, length: int = 100) -> tuple[CausalLM, list[list[int]]]:
    """Return a random model whose keys have an outlier channel, and texts that it writes itself.

    Trained models have such channels, and weights with tails heavier than normal ones.
    """
    generator = torch.Generator().manual_seed(seed)
    model = qwen3_model(RANDOM).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.fill_(1.0) if weight.dim() == 1 else weight.copy_(student_t(weight.shape, generator) * STD)
        if name.endswith("k_norm.weight"):
            weight[0] = OUTLIER
    engine = Engine.for_model(model, kv_bytes=2**24, kernel="torch")
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=n) for n in range(num_texts)]
    return model, [done.token_ids for done in generate_all(engine, [[1]] * num_texts, params, progress=False)]


def student_t(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers from Student's t distribution with 3 degrees of freedom."""
    normal, *three = torch.randn((4, *shape), generator=generator)
    return normal / torch.stack(three).square().mean(0).sqrt()

"""Course machinery. Claims of pages about pinned packages hold in them; figures on paper follow from the shapes.

Protects readers from a version, a behaviour or a figure on a page that the code and its packages no longer have. Only
figures are looked for, with their units, and never the words around them.
"""

import json
import math
import re
from functools import cache

from scripts import ROOT
from scripts.bench import blocks
from scripts.bench.allocator import placements
from scripts.bench.parallel import weight_bytes
from scripts.bench.windows_counts import GIB, MODELS, POOL, sequence_bytes
from scripts.make_random_qwen3 import SHAPES

import pytest
import torch
from transformers import DeepseekV3Config

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.distributed.tensor_parallel.shard import bytes_per_step, gathered_bytes_per_step
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.pocket import POCKET_DIR
from mini_engine.speculation.adapt import share_of_rows
from mini_engine.speculation.options import Speculation
from mini_engine.tiers.records import CRC, HEADER
from mini_engine.windows.kept import KeptWindows

LESSONS = ROOT / "lessons"
SMALL = Qwen3Config(**SHAPES["0.6B"])


@cache
def page(folder: str) -> str:
    """Return a page's text, with its lines joined."""
    return " ".join((LESSONS / folder / "README.md").read_text(encoding="utf-8").split())


def gives(folder: str, *figures: str) -> None:
    """Assert that a page gives each figure, or each row of figures of a table."""
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", page(folder)), (
            f"write {figure} in lessons/{folder}/README.md: that is what was just computed"
        )


def test_the_size_of_a_records_header_is_the_one_on_the_page():
    gives("l12_tiers", f"{HEADER.size} + {CRC.size} bytes")


def test_what_a_pool_can_place_is_what_lesson_2_says():
    rows = placements(2_000)  # what --quick measures
    anywhere, first, best = (f"{row['held when one finds no room, %']:.1f} %" for row in rows)
    gives("l2_token_flat", anywhere, first, best)
    assert rows[0]["of these, enough were free, %"] == 0, "with blocks anywhere, enough free blocks are always enough"
    assert all(row["of these, enough were free, %"] > 99 for row in rows[1:])


def test_a_block_has_the_pieces_that_lesson_19_and_the_bench_say():
    piece, pieces = math.prod(blocks.PART) * 2, blocks.PARTS
    assert pieces * piece == 16 * SMALL.kv_bytes_per_token(torch.bfloat16), "the bench has the shape that it names"
    gives("l19_handover", f"{pieces} pieces of {piece // 2**10} KiB", f"{pieces * piece / 2**20} MiB apart")
    gives("l19_handover", f"{blocks.CHOSEN} of {blocks.BLOCKS} blocks, {blocks.CHOSEN * pieces * piece // 2**20} MiB")
    gives("l19_handover", f"{blocks.CHOSEN * pieces:,} copies", f"{blocks.CHOSEN} copies", f"{pieces} gathers")
    gives("l2_token_flat", f"{blocks.BLOCKS * pieces * piece // 2**20} MiB")


def test_two_ranks_read_as_much_as_lesson_18_says():
    cut, head = weight_bytes(SMALL, 2), 2 * SMALL.vocab_size * SMALL.hidden_size
    for part in (head, cut / 2 + head):
        gives("l18_ranks", f"{part / (cut + head):.0%}".replace("%", " %"))


def test_the_larger_models_arithmetic_is_lesson_18s():
    shape = SHAPES["0.6B"] | dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64)
    config = Qwen3Config(**(shape | dict(num_attention_heads=64, tie_word_embeddings=False)))
    cut, head, rate = weight_bytes(config, 2), 2 * config.vocab_size * config.hidden_size, 3.35e12
    alone, four = (1e3 * (cut + head) / n / rate for n in (1, 4))
    together, meetings = cut + 2 * head, 2 * config.num_hidden_layers + 2
    gives("l18_ranks", *(f"{size / 1e9:.1f} GB" for size in (cut, head, together, together / 4)))
    gives("l18_ranks", f"{1e3 / alone:.0f} tokens/s", *(f"{ms:.1f} ms" for ms in (alone, four, alone - four)))
    gives("l18_ranks", str(meetings), f"{15e-3 * meetings:.2f} ms", f"{1.3 * meetings:.0f} ms")


def test_what_a_step_exchanges_is_what_lesson_18_says():
    def row(tokens: int, rows: int, unit: int, digits: int) -> tuple[str, str]:
        sums, logits = bytes_per_step(SMALL, tokens, 2), gathered_bytes_per_step(SMALL, rows, 2, 2)
        return f"{sums / unit:.{digits}f}", f"{logits / unit:.{digits}f}"

    each, all_reduces = row(1, 1, 2**10, 0), 2 * SMALL.num_hidden_layers + 1
    gives("l18_ranks", f"1 | {all_reduces} | {each[0]} KiB | {each[1]} KiB")
    gives("l18_ranks", "32 | {} | {} MiB | {} MiB".format(all_reduces, *row(32, 32, 2**20, 1)))
    sums, logits = row(4096, 1, 2**20, 0)[0], each[1]
    gives("l18_ranks", f"4,096 | {all_reduces} | {sums} MiB | {logits} KiB")
    pocket = Qwen3Config.from_dir(POCKET_DIR)
    brought = bytes_per_step(pocket, 1, 4) + gathered_bytes_per_step(pocket, 1, 4, 2)
    gives("l18_ranks", f"{brought / 2**10:.1f} KiB", f"{brought / 1e4:.1f} µs")


def test_computing_grows_faster_than_the_prompt_as_lesson_12_says():
    matrices = weight_bytes(SMALL, 1) * 2  # a multiplication and an addition for each weight
    each_key = 4 * SMALL.num_hidden_layers * SMALL.num_attention_heads * SMALL.head_dim
    gives("l12_tiers", f"{matrices / 1e9:.2f} Gflop", f"{each_key / 1e3:.0f} kflop")
    gives("l12_tiers", *(f"{count * matrices // each_key:,}" for count in (1, 2)))


# ---------------------------------------------------------------- tables of engines, measured once and kept


def kept(path: str) -> list[dict]:
    """Return the rows of a bench's kept JSON."""
    return json.loads((LESSONS / path).read_text(encoding="utf-8"))["rows"]


def test_the_longest_gaps_on_the_pages_of_figures_are_lesson_19_s():
    first, *_, last = kept("l19_handover/handover.json")
    figures = f"{first['max ms']:,.0f} and {last['max ms']:.0f} ms"
    for path in ("README.md", "ladder/README.md"):
        assert figures in (LESSONS / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("first_s", "gap_ms", "met"), [(2, 200, "chunks of 128"), (4, 100, "hand-over")])
def test_each_pair_of_lesson_19_s_targets_is_met_by_one_way(first_s, gap_ms, met):
    rows = kept("l19_handover/handover.json")
    assert [row["prompts"] for row in rows if row["first s"] < first_s and row["p99 ms"] < gap_ms] == [met]
    gives("l19_handover", f"{first_s} s and", f"{gap_ms} ms")


def test_what_lesson_20_says_of_40_agents_and_of_belady_is_what_was_measured():
    rows = json.loads((LESSONS / "l20_agents/agents.json").read_text(encoding="utf-8"))["sessions"]["rows"]
    hits = {(int(row["agents"]), row["policy"]): row["hits %"] for row in rows}
    gives(
        "l20_agents", f"40 agents find {hits[40, 'sessions']:.0f} % of their prompts instead of {hits[40, 'LRU']:.0f} %"
    )
    gives("l20_agents", f"{hits[24, 'SLRU']:.0f} % instead of {hits[24, 'LRU']:.0f}")
    assert all(row["of Belady's %"] > 95 for row in rows if row["policy"] == "sessions"), "the page says so"


# ---------------------------------------------------------------- on paper


def test_what_a_cache_of_windows_can_hold_and_find_nothing_is_what_lesson_15_says():
    kept_windows = KeptWindows(RefCountedAllocator(64, 16), window=64, num_groups=1)

    def found(held: set[int]) -> int:
        kept_windows.companions = dict.fromkeys(held, (0,))
        return kept_windows.num_usable(range(62))

    held = {block for block in range(62) if block % 4}
    assert found(held) == 0 and all(found(held | {block}) for block in range(0, 62, 4)), "no larger one finds nothing"
    assert found(set(range(58))) == 58, "without the last four, all before them are found"
    gives("l15_windows", f"{len(held)} blocks", f"{len(held) / 62:.0%}".replace("%", " %"))


def test_olmo_3_s_longest_text_takes_what_lesson_15_says():
    shape = next(shape for shape in MODELS if shape.name == "OLMo 3 7B")
    full, windows = (sequence_bytes(one, shape.longest) for one in (shape.without_windows, shape))
    sizes = f"{full / GIB:.0f} | {windows / GIB:.1f} | {POOL // full} → {POOL // windows}"
    gives("l15_windows", f"{shape.longest:,} | {sizes}")


def test_a_step_has_as_many_drafts_as_lesson_14_says():
    gives("l14_speculation", f"{share_of_rows(Speculation().max_rows, 1)} drafts")


def test_a_latent_in_8_bits_is_as_large_as_lesson_16_says():
    rank, rope = DeepseekV3Config().kv_lora_rank, DeepseekV3Config().qk_rope_head_dim
    gives("l16_latents", f"{rank + 4 * rank // 128 + 2 * rope} bytes", "1,152")
    assert 2 * (rank + rope) == 1152

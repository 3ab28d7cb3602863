"""Lesson 16. Latents in lesson 10's loop, and through the doors that users come in by."""

import json
import shutil

import pytest
import torch

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine import LLM, SamplingParams
from mini_engine.__main__ import main
from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import KvPool
from mini_engine.latents.store import LatentKv
from mini_engine.pocket import POCKET_DIR
from tests.l16.models import NEW, PROMPTS, greedy, model, write
from tests.support import hf_greedy

pytestmark = pytest.mark.reference


def test_lesson_10s_loop_with_its_own_pool():
    config, page, size = model().config, 4, 304
    blocks = KvPool(config, size // page + 1, page, load_kernel("torch", latents=True))
    for layer in (*blocks.K, *blocks.V):
        layer.fill_(float("nan"))
    table, allocator = ReqToTokenPool(len(PROMPTS), 144), TokenToKVPoolAllocator(size, page)
    kv = DeviceKv(table, allocator, SlotPool(blocks), LatentKv(config, blocks))
    for _ in range(2):
        assert generate_on_device(model(), kv, PROMPTS, NEW) == [greedy(ids) for ids in PROMPTS]
    assert allocator.available_size() == size, "all slots are free again"


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """Return a random checkpoint with the pocket model's tokenizer."""
    folder = tmp_path_factory.mktemp("with a tokenizer")
    vocab_size = json.loads((POCKET_DIR / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    write(folder, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(POCKET_DIR / name, folder)
    return folder


def answer_of(folder, ids):
    """Return Hugging Face's answer of a checkpoint that is no family's."""
    from transformers import AutoModelForCausalLM

    return hf_greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids, NEW)


def test_llm_and_the_command_line_run_it(with_tokenizer, capsys):
    with LLM(with_tokenizer, num_blocks=64) as llm:
        ids = llm.encode("Once upon a time")
        [answer] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=NEW), progress=False)
        assert answer.token_ids == answer_of(with_tokenizer, ids)
        [chat] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=3), progress=False)
        assert len(chat.token_ids) == 3
    options = ["--model", str(with_tokenizer), "--max-tokens", str(NEW), "--temperature", "0", "--num-blocks", "64"]
    assert main(["generate", *options, "Once upon a time"]) == 0
    assert answer.text.strip() in capsys.readouterr().out

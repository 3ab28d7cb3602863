"""Lesson 16. The shipped model with latents: what it caches, and how sure it is of its answers."""

import json

from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch

from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.families.deepseek_config import DeepseekConfig

POCKET_LATENT_DIR = shipped_checkpoint("pocket-latent")

pytestmark = pytest.mark.reference  # about the shipped model, not about a task


def test_it_caches_latents_in_dense_layers_only():
    config = json.loads((POCKET_LATENT_DIR / "config.json").read_text(encoding="utf-8"))
    assert config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert DeepseekConfig.from_dir(POCKET_LATENT_DIR).kv_bytes_per_token(torch.float32) == (64 + 32) * 6 * 4


@pytest.mark.nightly
def test_it_completes_lines_that_it_has_never_read_and_leaves_no_tie():
    from scripts.pocket.evaluation import continue_greedily, wrong_lines
    from scripts.pocket.held_out import held_out_lines

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(POCKET_LATENT_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(POCKET_LATENT_DIR)
    lines = held_out_lines()
    assert len(wrong_lines(model, tokenizer, lines)) <= 3, "README.md of the folder says 243 of 246"
    answers = continue_greedily(model, [tokenizer.encode(prompt) for prompt in COURSE_PROMPTS])
    assert min(min(answer.gaps) for answer in answers) > 0.01, "README.md of the folder says 0.014"

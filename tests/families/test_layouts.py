"""Course machinery. Conformance: files that name or nest things in another way, or hold more, give the same model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mini_engine import LLM, SamplingParams
from mini_engine.assembly.loading import load, reader_of
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.names import HEAD
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.tiers.opening import stored_digest, weights_digest
from tests.families import towers
from tests.families.rows import FIRST, FIRST_KIN, Model, parametrized, some
from tests.l0.edits import rewritten
from tests.support import refused

Tensors = Mapping[str, Tensor]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def odd(tensors: Tensors) -> Tensors:
    """Drop "model.", store a tied head in place of its embedding, and add what other classes and older files have."""
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if HEAD not in found and "embed_tokens.weight" in found:
        found[HEAD] = found.pop("embed_tokens.weight")
    more = dict.fromkeys(("score.weight", "v_head.summary.weight", "v_head.summary.bias"), torch.ones(2))
    return found | more | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


@parametrized(some([*FIRST, *FIRST_KIN]))
def test_odd_names_and_other_classes_heads_are_no_reason_to_refuse(model: Model, tmp_path, capsys):
    plain = dict(load(model.path, "float32", "cpu").named_parameters())
    capsys.readouterr()
    ours = load(rewritten(model.path, tmp_path / "odd", odd), "float32", "cpu")
    assert {name for name, weight in ours.named_parameters() if not torch.equal(weight, plain.pop(name))} == set()
    assert not plain
    [warning] = capsys.readouterr().err.splitlines()
    assert all(name in warning for name in ("score.weight", "v_head.summary.bias", "v_head.summary.weight"))


def test_a_router_s_bias_stays_in_float32():
    """It differs between experts by less than bfloat16 can say; a record's identity must be the same by either way."""
    [model] = [one for one in FIRST_KIN if one.family == "DeepSeek-V3 with experts"]
    plain = dict(load(model.path, "float32", "cpu").named_parameters())
    ours = load(model.path, "bfloat16", "cpu")
    biases = {name: bias for name, bias in ours.named_parameters() if name.endswith("e_score_correction_bias")}
    assert biases and all(torch.equal(bias, plain[name]) for name, bias in biases.items())
    assert {weight.dtype for name, weight in ours.named_parameters() if name not in biases} == {torch.bfloat16}
    assert stored_digest(reader_of(model.path).stored(model.path), torch.bfloat16) == weights_digest(ours)


def as_in_text_files(tensors: Tensors) -> Tensors:
    return {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}


def as_in_memory(tensors: Tensors) -> Tensors:
    """Name tensors as transformers 5 has them in its modules, and as some files have them."""
    return {
        name.removeprefix("language_model.") if name.endswith(HEAD)
        else f"model.{name.replace('language_model.model.', 'language_model.')}": tensor
        for name, tensor in tensors.items()
    }  # fmt: skip


@pytest.mark.parametrize("change", [as_in_memory, as_in_text_files])
@pytest.mark.parametrize("shape", list(towers.GEMMA)[:2])
def test_a_gemma_s_text_is_found_wherever_it_lies(tmp_path, capsys, change, shape):
    path = towers.beside_a_tower("Gemma3", towers.GEMMA)(shape)
    plain = dict(load(path, "float32", "cpu").named_parameters())
    capsys.readouterr()
    ours = dict(load(rewritten(path, tmp_path / "other", change), "float32", "cpu").named_parameters())
    assert ours.keys() == plain.keys() and all(torch.equal(ours[name], plain[name]) for name in plain)
    assert capsys.readouterr().err == "", "a vision tower is no reason for a warning"


@pytest.mark.parametrize("architecture", ["Qwen3_5", "Gemma3"])
def test_a_model_with_a_tower_chats_and_refuses_images(tmp_path, architecture):
    path = towers.write(tmp_path / "model", architecture, vocab_size=2048)
    for name in TOKENIZER:
        shutil.copy(shipped_checkpoint("pocket") / name, path)
    picture = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with LLM(path, num_blocks=64) as llm:
        with refused(UserError, "image_url parts"):
            llm.chat([{"role": "user", "content": picture}], progress=False)
        [answer] = llm.chat(
            [{"role": "user", "content": picture[:1]}], SamplingParams(temperature=0, max_tokens=4), progress=False
        )
    assert len(answer.token_ids) == 4 and not answer.error


def test_a_gemma_beside_a_tower_may_leave_out_what_is_usual(tmp_path):
    """As the smallest published file does, which names only sizes that differ from transformers' defaults."""
    text = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=7, sliding_window=1024)
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    config = config_in(tmp_path, raw)
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (262_208, 8, 4)
    assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    assert not config_in(tmp_path, raw | {"tie_word_embeddings": False}).tie_word_embeddings


def config_in(folder: Path, raw: dict):
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return reader_of(folder).shape(folder)

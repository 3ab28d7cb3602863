"""Course machinery. scripts/train_pocket.py is reproducible, writes all files or none, and reports mistakes plainly.

Protects the model that all tests share: it can be trained again, bit for bit, and no file is left half written.
"""

import json
from itertools import pairwise

from scripts import train_pocket
from scripts.pocket import saved_run, training
from scripts.pocket.plan import Plan

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_engine.assembly.loading import load
from mini_engine.families.qwen3 import load_model

SIZES = {
    "steps": 3,
    "batch-size": 2,
    "row-length": 24,
    "hidden-size": 24,
    "layers": 1,
    "vocab-size": 320,
    "documents": 60,
    "threads": 1,  # it stays set for the tests that follow in this process
}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def run(out, *more: str) -> int:
    return train_pocket.main([*TINY, "--json", "--out", str(out), *more])


@pytest.fixture
def unexamined(monkeypatch):
    """Leave out the evaluation, which takes longer than such a training: one test looks at it."""
    monkeypatch.setattr(train_pocket, "examine", lambda directory: {})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("train") / "new" / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_pocket, "examine", lambda directory: {})
        assert run(out) == 0
    return out


def test_the_directory_opens_in_transformers_and_in_the_course(tiny):
    theirs = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert theirs.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode("Hello, world")) == "Hello, world"
    ours = load_model(tiny).state_dict()
    assert torch.equal(ours["model.embed_tokens.weight"], theirs.model.embed_tokens.weight.float())


def test_the_same_seed_gives_the_same_files(tiny, tmp_path, unexamined):
    assert run(tmp_path / "again") == 0
    for file in sorted(tiny.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), f"{file.name} differs"


def test_a_hybrid_opens_in_transformers_and_in_the_course_and_remembers(tmp_path, unexamined):
    assert run(tmp_path / "hybrid", "--kind", "hybrid", "--layers", "4") == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    assert theirs.config.model_type == "qwen3_5_text"
    assert theirs.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    ours = load(tmp_path / "hybrid", "float32", "cpu").state_dict()
    steps = torch.nn.functional.softplus(ours["model.layers.0.linear_attn.dt_bias"])
    assert steps.min() > 0.0005 and steps.max() < 0.2, "with time steps near 1 a layer forgets within a few tokens"
    assert torch.equal(ours["model.embed_tokens.weight"], theirs.model.embed_tokens.weight.float())


def test_a_run_that_was_cut_off_continues_to_the_same_weights(tmp_path, monkeypatch, unexamined):
    saved = ("--saved-run", str(tmp_path / "run.pt"))
    assert run(tmp_path / "whole") == 0
    monkeypatch.setattr(saved_run, "EVERY", 2)
    real, steps = training.loss_of, []

    def cut_off(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(training, "loss_of", cut_off)
    assert run(tmp_path / "cut", *saved) == 130
    assert (tmp_path / "run.pt").is_file() and not (tmp_path / "cut").exists()
    assert run(tmp_path / "cut", *saved, "--seed", "1") == 2, "a run with other settings is not continued"
    steps.clear()
    assert run(tmp_path / "cut", *saved) == 0 and len(steps) == 1, "two of the three steps were done"
    name = "model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "run.pt").exists()


def test_another_seed_gives_other_weights_and_json_tells_the_result(tiny, tmp_path, capsys):
    assert run(tmp_path, "--seed", "1") == 0
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() != (tiny / name).read_bytes()
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_read"] == 3 * 2 * 24
    assert result["held_out"]["lines"] >= 200
    assert result["smallest_gap"]["gap"] >= 0


def test_ctrl_c_leaves_the_old_files_and_nothing_else(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old", encoding="utf-8")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "loss_of", interrupted)
    assert run(out) == 130
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
    assert (out / "config.json").read_text(encoding="utf-8") == "old"
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "1 or more"),
        (["--learning-rate", "-1"], "-1 is not a number above zero"),
        (["--vocab-size", "100"], "300 or more"),
        (["--faster"], "--faster"),
    ],
)
def test_a_bad_argument_gets_one_line_and_exit_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        train_pocket.main(arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.count("\n") == 1
    assert named in message


def test_an_out_that_is_a_file_gets_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert run(tmp_path / "file") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_rows_start_at_a_document_and_each_tenth_batch_is_one_long_row():
    documents = [[1, 2, 3, 0], [4, 5, 0]]
    plan = Plan(batch_size=3, row_length=6)
    for step, batch in zip(range(1, 31), training.batches(documents, plan), strict=False):
        assert batch.shape == ((1, 3 * 6 + 1) if step % 10 == 0 else (3, 6 + 1))
        for row in batch.tolist():
            assert row[0] in (1, 4), "a row begins inside a document"
            assert all(after in (1, 4) for before, after in pairwise(row) if before == 0)


def test_the_learning_rate_rises_then_falls_to_zero():
    plan = Plan(steps=1000)
    factors = [plan.rate_factor(step) for step in range(1001)]
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[0] < 0.1
    assert factors[-1] == 0

"""Lesson 11. The smoke script on a random hybrid, and the commands that take one without a flag."""

import io
import json
import shutil

from scripts import l11_smoke
from scripts.smoke.arguments import pocket_dir

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.__main__ import main as mini_engine
from mini_engine.hybrid.hybrid_config import HybridConfig
from tests.l11.models import checkpoint, write_hybrid

FAMILY = "every third, four value heads a key head, wide keys"
PROMPTS = ["--prompt-ids", "1,2,3,4,5,6,7,8,9,10", "--prompt-ids", "4", "--prompt-ids", "5,6,7,8,9"]


def smoke(*arguments):
    try:
        return l11_smoke.main(["--model", str(checkpoint(FAMILY)), *PROMPTS, *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.reference  # a check runs the script itself
def test_every_path_equals_hugging_face(capsys):
    code = smoke("--max-new-tokens", "9", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"], report["faults"]
    paths = {"alone", "batched", "chunks of 1", "chunks of 7", "preempted", "cached prefix", "on device"}
    assert paths <= set(report["kv"]["equal"]) and set(report["kv"]["equal"].values()) == {3}
    assert report["kv"]["state_bytes"] > 0
    assert set(report["kv"]["left_out"]) == {"chunks of 33", "chunks of 64"}, "the longest prompt has 10 tokens"


@pytest.mark.parametrize("arguments, words", [(["--block-size", "0"], "0 is too small"), (["--dtype", "int4"], "int4")])
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, words):
    checkpoint(FAMILY)  # written now, if it was not yet: transformers shows a bar on stderr
    capsys.readouterr()
    assert smoke(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1, error


def test_a_qwen3_is_refused_and_pointed_back(capsys):
    assert l11_smoke.main(["--model", str(pocket_dir()), *PROMPTS]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("number", range(11))
def test_an_earlier_lesson_s_script_points_to_what_runs_it(number, capsys):
    script = pytest.importorskip(f"scripts.l{number}_smoke", reason="needs the server's packages")
    path = str(checkpoint(FAMILY))
    capsys.readouterr()  # transformers shows its progress when it writes one
    assert script.main(["--model", path, *PROMPTS]) == 2
    error = capsys.readouterr().err
    assert "LLM" in error and len(error.strip().splitlines()) == 1, error


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    directory = write_hybrid(tmp_path_factory.mktemp("hybrid"), vocab_size=2048, bos_token_id=2045, eos_token_id=2047)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(pocket_dir() / name, directory)
    return directory


def test_llm_takes_a_hybrid_without_a_flag(with_tokenizer):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = "The capital of France is Paris. France is a country in Europe."
    with LLM(with_tokenizer, block_size=4) as llm:
        assert isinstance(llm.engine.config, HybridConfig)
        first, second = (llm.generate(prompt, params, progress=False)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and len(first.token_ids) == 6
    assert second.num_cached_tokens > 0


def test_the_command_generate_takes_a_hybrid_without_a_flag(with_tokenizer, capsys):
    assert mini_engine(["generate", "Once upon a time", "--model", str(with_tokenizer), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out


def test_the_command_chat_takes_a_hybrid_without_a_flag(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Count to twenty.\n"))
    assert mini_engine(["chat", "--model", "pocket-hybrid", "--max-tokens", "6", "--temperature", "0"]) == 0
    assert "One, two" in capsys.readouterr().out

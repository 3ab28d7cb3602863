"""Lesson 6. `python -m mini_engine generate` and `chat`: output, error messages, and Ctrl-C."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from mini_engine.__main__ import main
from mini_engine.assembly import llm as llm_module
from mini_engine.base.errors import UserError
from mini_engine.base.signals import noting
from mini_engine.cli.dtype import chosen_dtype
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.support import imported_by

# What exists by lesson 6: no packed layers, no tree. tests/course/test_front_door.py runs the defaults.
OWN = ["--backend", "reference", "--no-prefix-caching", "--num-blocks", "64"]


def run(capsys, *arguments):
    try:
        own = OWN if arguments[:1] in (("generate",), ("chat",)) else []
        code = main([*arguments[:1], *own, *arguments[1:]])
    except SystemExit as stop:
        code = stop.code
    streams = capsys.readouterr()
    return code, streams.out, streams.err


@pytest.mark.parametrize(("able", "computed"), [(True, "bfloat16"), (False, "float32")])
def test_a_user_s_checkpoint_is_computed_in_its_own_dtype_where_the_processor_can(
    able, computed, written, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    monkeypatch.setattr(llm_module, "LLM", lambda model, dtype, **rest: asked.append(dtype) or exit_early())
    code, _, err = run(capsys, "generate", "Hello", "--model", str(written()))
    assert code == 2 and asked == ["bfloat16" if able else "auto"], "auto is float32 on a CPU"
    said = err.splitlines()[0]
    assert said.startswith(f"computing in {computed}") and "--dtype" in said, (
        "and it says so, and how to have the other"
    )


@pytest.mark.parametrize("asked", [[], ["--model", "pocket"], ["--model", str(POCKET_DIR)], ["--dtype", "float32"]])
def test_the_course_s_models_and_a_named_dtype_are_computed_without_a_word(asked, written, capsys):
    model = [] if "--model" in asked or not asked else ["--model", str(written())]
    code, out, err = run(capsys, "generate", "The capital of France is", "--max-tokens", "3", *model, *asked)
    assert code == 0 and out.startswith(" Paris") and err == ""


@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"torch_dtype": "float16"}, {}])
def test_any_other_checkpoint_stays_in_float32(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert chosen_dtype(str(tmp_path), "auto", "cpu") == ("auto", "")


def exit_early():
    raise UserError("that is all")


def test_generate_speaks_json(capsys):
    code, out, _ = run(capsys, "generate", "The capital of France is", "--max-tokens", "3", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["text"].startswith(" Paris") and len(answer["token_ids"]) == 3
    assert answer["finish_reason"] == "length" and answer["error"] is None


def test_generate_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is"))
    assert run(capsys, "generate", "-", "--max-tokens", "1")[1] == " Paris\n"


def test_generate_prints_figures_separately_from_the_text(capsys):
    _, out, err = run(capsys, "generate", "The capital of France is", "--max-tokens", "2", "--stats")
    assert "tokens/s" in err and "tokens/s" not in out and ", 0 held," in err


@pytest.mark.parametrize(
    "arguments, values",
    [
        ([], "COMMAND"),
        (["sing"], "'sing'"),
        (["generate"], "prompt"),
        (["generate", ""], "prompt"),
        (["generate", "x", "--model", "no/such/dir"], "no/such/dir"),
        (["generate", "x", "--model", ""], "''"),
        (["generate", "x", "--temperature", "-1"], "temperature -1.0"),
        (["generate", "x", "--top-p", "2"], "top_p 2.0"),
        (["generate", "x", "--max-tokens", "9000"], "8192"),
        (["generate", "x", "--num-blocks", "1"], "--num-blocks 2"),
        (["generate", "x", "--num-blocks", "1" + "0" * 15], ""),
        (["generate", "x", "--block-size", "1" + "0" * 30], "18446744073709551615"),
        (["generate", "x", "--model", "m" * 5000], "mmm"),
        (["chat", "--temperature", "hot"], "--temperature 'hot'"),
        (["chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs '[1]'"),
        (["chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs '{'"),
        (["generate", "x", "--chat", "--chat-template-kwargs", '{"tools": 1}'], "'tools'"),
    ],
)
def test_a_mistake_exits_2_with_one_line(capsys, arguments, values):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1, err
    assert all(value in err for value in values.split()), err


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--chat"]], ids=["text", "chat"])
def test_generate_imports_nothing_that_it_does_not_need(options):
    """Counted, not timed: each of these takes from a quarter of a second to a whole one."""
    imported = imported_by("generate", "The capital of France is", "--max-tokens", "3", *OWN, *options)
    slow = {"transformers", "torch._dynamo", "torch._inductor", "sympy", "rich", "fastapi"}
    assert "torch" in imported and not imported & slow, f"python -X importtime says what imports {imported & slow}"


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"]], ids=" ".join)
def test_help_needs_no_torch(command):
    assert not imported_by(*command, "--help") & {"torch", "tokenizers", "jinja2", "fastapi"}


@pytest.mark.nightly
def test_a_closed_pipe_ends_the_command_without_a_traceback():
    command = [sys.executable, "-m", "mini_engine", "generate", "Once upon a time", "--max-tokens", "400", *OWN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1 and err == "", err


def talk(capsys, monkeypatch, *lines, options=()):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code, out, err = run(capsys, "chat", *options)
    assert code == 0 and err == ""
    return out


def prompt_tokens(out):
    """Return the length of the last prompt, from the figures that /stats prints."""
    return int(re.findall(r"\((\d+) prompt tokens", out)[-1])


def test_chat_answers_and_keeps_the_conversation(capsys, monkeypatch):
    out = talk(
        capsys, monkeypatch, "What is the capital of Japan?", "What is the capital of France?", "/stats", "Hello"
    )
    assert "Tokyo" in out and "Paris" in out
    asked = prompt_tokens(out)
    assert asked > 30, f"{asked} prompt tokens: earlier questions and answers are part of the prompt"


@pytest.mark.parametrize("given", ["false", '"<|im_end|>"'])
def test_the_template_is_told_what_the_options_say(capsys, monkeypatch, written, given):
    directory = written()
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}{{ enable_thinking }}", encoding="utf-8")
    options = ["--model", str(directory), "--dtype", "float32", "--chat-template-kwargs"]
    options.append(f'{{"enable_thinking": {given}}}')
    tokenizer, letters = Tokenizer(directory), f"Hello{json.loads(given)}"
    _, out, _ = run(capsys, "generate", "Hello", "--chat", "--json", "--max-tokens", "1", *options)
    assert json.loads(out)["prompt_ids"] == tokenizer.encode_plain(letters)
    out = talk(capsys, monkeypatch, "/stats", "Hello", options=options)
    assert prompt_tokens(out) == len(tokenizer.encode_plain(letters))


def test_chat_reset_forgets(capsys, monkeypatch):
    out = talk(capsys, monkeypatch, "What is the capital of Japan?", "/reset", "/stats", "Hello")
    assert prompt_tokens(out) < 20


def test_chat_has_commands(capsys, monkeypatch):
    out = talk(capsys, monkeypatch, "/help", "/what", "", "/quit", "no longer read")
    assert out.count("/reset") == 2 and "no longer" not in out


def test_chat_reports_a_conversation_that_is_too_long(capsys, monkeypatch):
    out = talk(capsys, monkeypatch, "long " * 900, "What is the capital of Japan?")
    assert "/reset" in out and "Tokyo" in out, "a message that does not fit must not end the session"


@pytest.mark.skipif(os.name == "nt", reason="NOT CHECKED: sends a POSIX signal")
def test_the_first_ctrl_c_sets_a_flag_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with noting(signal.SIGINT, twice=KeyboardInterrupt) as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="NOT CHECKED: sends a POSIX signal")
def test_ctrl_c_stops_an_answer_and_keeps_the_session_open():
    options = [*OWN, "--num-blocks", "300", "--max-tokens", "4000", "--temperature", "30"]
    command = [sys.executable, "-u", "-m", "mini_engine", "chat", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"Tell me a story.\n")
    process.stdin.flush()
    assert process.stdout.read(1), "no answer came"
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/help\n")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert b"(stopped)" in out and b"/reset" in out and err == b"", (out[-200:], err)

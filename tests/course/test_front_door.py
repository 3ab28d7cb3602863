"""Course machinery. The package's public names: the README's first examples work as printed."""

import subprocess
import sys
from pathlib import Path

import pytest

import mini_engine
from mini_engine import LLM, Completion, SamplingParams, TextDelta, UserError
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_manager import PrefixCacheManager

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=20, stop=["\n"])


@pytest.fixture(scope="module")
def llm():
    with LLM(num_blocks=128) as llm:
        yield llm


def test_text_and_ids_are_answered_together(llm):
    text, ids = llm.generate(["The capital of France is", [12, 7, 99]], GREEDY, progress=False)
    assert isinstance(text, Completion) and text.text.startswith(" Paris") and "\n" not in text.text
    assert ids.prompt_token_ids == [12, 7, 99] and ids.num_cached_tokens == 0
    assert {text.finish_reason, ids.finish_reason} <= {"stop", "length"}


def test_a_conversation_is_answered(llm):
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    assert "Tokyo" in llm.chat(question, SamplingParams(temperature=0, max_tokens=40), progress=False)[0].text


def test_a_stream_comes_in_pieces(llm):
    pieces = list(llm.stream("Once upon a time"))
    assert len(pieces) > 5 and all(isinstance(piece, TextDelta) for piece in pieces)


def test_bad_input_is_a_user_error_and_a_value_error(llm):
    with pytest.raises(UserError):
        llm.generate(3.5)
    assert issubclass(UserError, ValueError)


def test_prefixes_are_shared_unless_turned_off(llm):
    assert isinstance(llm.engine.scheduler.manager, PrefixCacheManager)
    plain = LLM(num_blocks=16, enable_prefix_caching=False, backend="reference")
    assert type(plain.engine.scheduler.manager) is KvCacheManager


@pytest.mark.parametrize(
    "options, param",
    [
        (dict(backend="gpu"), "backend"),
        (dict(dtype="int8"), "dtype"),
        (dict(device="cuda"), "device"),
        (dict(model="no/such/dir/at/all"), None),
    ],
)
def test_an_option_that_cannot_be_used_is_one_sentence(options, param):
    if options.get("device") == "cuda":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError) as caught:
        LLM(**options)
    assert caught.value.param == param and "\n" not in str(caught.value)


def test_every_public_name_exists():
    for name in mini_engine.__all__:
        assert getattr(mini_engine, name) is not None
    with pytest.raises(AttributeError):
        _ = mini_engine.Llm


def modules_after(code: str) -> set[str]:
    """Return what a new Python process has imported after `code`."""
    show = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    return set(done.stdout.split())


def test_import_mini_engine_imports_no_library():
    brought = modules_after("import mini_engine; mini_engine.__version__") - modules_after("pass")
    heavy = {name for name in brought if not name.startswith(("mini_engine", "importlib", "typing"))}
    foreign = {name.partition(".")[0] for name in heavy} - set(sys.stdlib_module_names)
    assert not foreign, f"import mini_engine must be quick; it imports {sorted(foreign)}"

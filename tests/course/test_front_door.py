"""Course machinery. The package's public names: the README's first examples work as printed.

Protects programs that use the engine as a library, and readers who try the README's examples first.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import mini_engine
from mini_engine import LLM, Completion, EngineConfig, SamplingParams, TextDelta, UserError
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache

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
    assert isinstance(llm.engine.scheduler.manager.coordinator.prefixes, PrefixCache)
    plain = LLM(num_blocks=16, enable_prefix_caching=False, backend="reference")
    assert type(plain.engine.scheduler.manager) is KvCacheManager


REFUSED = {  # an option, and values that it cannot have
    "backend": ["gpu"],
    "block_sise": [8],
    "block_size": ["8", True],
    "cuda_graphs": ["yes"],
    "device": ["cuda", "nope", 5],
    "dtype": ["int8", 5],
    "enable_prefix_caching": ["no"],
    "kernel": [5],
    "kv_always": ["no"],
    "kv_bytes": [0, "1G", 1000],
    "kv_cache_dir": [5],
    "kv_disk_bytes": [2**20],
    "kv_dtype": [None],
    "kv_host_bytes": [-1],
    "model": [5],
    "num_blocks": [1, 2.5],
    "scheduler_config": [5, {"max_num_seqs": 4}],
    "speculate": ["many"],
    "tensor_parallel_size": ["2", None],
    "tokenizer": [5],
}


@pytest.mark.parametrize(
    "options, param",
    [
        *(({name: value}, name) for name, values in REFUSED.items() for value in values),
        (dict(model="no/such/dir/at/all"), None),
        (dict(block_size=10**9), "kv_bytes"),
        (dict(kv_host_bytes=2**20, enable_prefix_caching=False), "enable_prefix_caching"),
        (dict(cuda_graphs=True, device="cpu"), "cuda_graphs"),
        (dict(config=EngineConfig(), block_size=8), "config"),
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


def test_whole_numbers_of_any_type_are_whole_numbers():
    numpy = pytest.importorskip("numpy")
    config = EngineConfig(num_blocks=numpy.int64(16), block_size=numpy.int32(8), kv_bytes=2e9)
    assert (config.num_blocks, config.block_size, config.kv_bytes) == (16, 8, 2 * 10**9)
    assert all(type(size) is int for size in (config.num_blocks, config.block_size, config.kv_bytes))
    params = SamplingParams(max_tokens=numpy.int64(3), top_k=numpy.uint8(2), temperature=numpy.float32(0))
    assert params == SamplingParams(max_tokens=3, top_k=2, temperature=0)
    assert type(params.max_tokens) is int
    for wrong in (True, 3.0, numpy.float64(3), "3", numpy.array([3])):
        with pytest.raises(UserError):
            SamplingParams(max_tokens=wrong)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_prompts_may_be_arrays_of_ids(llm, library):
    made = importlib.import_module(library)
    params, ids = SamplingParams(temperature=0, max_tokens=3), llm.encode("The capital of France is")
    expected = llm.generate([ids, ids[:3]], params, progress=False)
    one = made.asarray(ids)
    got = llm.generate([one, list(one[:3])] if library == "numpy" else [one, one[:3]], params, progress=False)
    assert [done.token_ids for done in got] == [done.token_ids for done in expected]
    assert llm.generate(one, params, progress=False)[0].token_ids == expected[0].token_ids, "one array is one prompt"
    rows = llm.generate(made.asarray([ids, ids]), params, progress=False)
    assert [done.token_ids for done in rows] == [expected[0].token_ids] * 2, "each row of a table is a prompt"
    assert next(llm.stream(one, params)).token_ids == expected[0].token_ids[:1]
    with pytest.raises(UserError, match="prompt"):
        llm.generate(made.asarray([0.5, 1.5]), params)


class Shy:
    """Cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no")


VALUES = {
    "text": "word " * 40_000,
    "table": [[1.5] * 900] * 900,
    "dict": {"a": "b" * 10**6},
    "no repr": Shy(),
    "no repr inside": [Shy()],
    "digits": 10**5000,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_an_error_quotes_long_values_in_short(llm, value):
    calls = [
        lambda: llm.chat(value),
        lambda: llm.generate([[value, "x"]]),
        lambda: llm.generate([1, 2], value),
        lambda: SamplingParams(stop=[value, 5]),
        lambda: SamplingParams(max_tokens=value if isinstance(value, str | dict | list) else [value]),
        lambda: EngineConfig(scheduler_config=value),
        lambda: llm.stream([1, 2], value),
    ]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value), str(caught.value)[:500]


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

"""Lesson 9. Fast layers without a compiler, and the memory that `speed_up` needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine.attention import cpu
from mini_engine.engine.loop import generate
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
from mini_engine.layers import native, speed_up
from tests.l9.test_fast_model import FAMILY, NEW, backends
from tests.support import both, checkpoint, forget_builds, hf_greedy, some_ids, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_compiler_the_torch_backend_is_used_and_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    forget_builds(native.LIBRARY, cpu.LIBRARY)
    try:
        model, hf = speed_up(load_model(checkpoint(FAMILY))), both(FAMILY)[1]
        err = capfd.readouterr().err
        assert err.count("no-such-compiler") == 1, err
        prompt = some_ids(17, hf.config.vocab_size, seed=17)
        contiguous = ContiguousKv(model.config, 100)
        got = generate(model, contiguous, CachedSequence(contiguous), prompt, NEW)
        assert got == hf_greedy(hf, prompt, NEW)
    finally:
        forget_builds(native.LIBRARY, cpu.LIBRARY)


MEASURE = """
import json, sys, torch
from pathlib import Path
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.layers import speed_up
from mini_engine.families.qwen3 import load_model

def peak():  # not getrusage: a child starts with its parent's peak there
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def answer(model, num_blocks):
    engine = Engine.for_model(model, num_blocks=num_blocks)
    engine.add_request("a", list(range(1, 40)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()

small, large, backend = sys.argv[1:]
answer(speed_up(load_model(small, torch.bfloat16), backend), 9)  # load everything that the first use loads
before = peak()
model = load_model(large, torch.bfloat16)
found = {"weights": sum(p.nbytes for p in model.parameters()), "head": model.head_weight.nbytes}
model = speed_up(model, backend)
answer(model, 9)
print(json.dumps(found | {"took": peak() - before}))
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="NOT CHECKED: peak memory, which is read from Linux's /proc"
)
@backends
@pytest.mark.parametrize("tied", [True, False])
def test_loading_and_packing_need_little_more_than_the_weights(tmp_path, tied, backend):
    sizes = dict(vocab_size=48_000, hidden_size=768, intermediate_size=3072, num_hidden_layers=4, head_dim=64)
    write_checkpoint(tmp_path, **sizes, tie_word_embeddings=tied, dtype="bfloat16")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint(FAMILY)), str(tmp_path), backend],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] > 100e6, "too small to tell a copy of the weights from other memory"
    second = found["head"] if backend == "torch" else 0  # oneDNN packs into new memory
    allowed = 1.3 * found["weights"] + second
    assert found["weights"] / 2 < found["took"] < allowed, (
        f"{found['took']} bytes for {found['weights']} bytes of weights"
    )

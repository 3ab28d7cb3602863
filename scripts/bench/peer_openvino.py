"""Course machinery. For suite `peers`: OpenVINO GenAI's continuous batching. Runs under the Python that has it.

The checkpoint is exported by optimum-intel with its weights as they are. K and V are in bfloat16 too: the CPU's default
of 8 bits would be another computation. Prompts share beginnings through its prefix cache.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.runs import Jobs, Step, Wave, Way

BATCH_TOKENS, AT_ONCE = 2048, 64


def exported(model: Path) -> Path:
    """Return the checkpoint in OpenVINO's format, in a folder beside it, which is written if necessary."""
    folder = model.with_name(f"{model.name}-openvino")
    if not folder.is_dir():
        from optimum.intel import OVModelForCausalLM  # pyright: ignore[reportMissingImports]  (its own environment)

        partial = folder.with_suffix(".partial")
        found: Any = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
        found.save_pretrained(partial)
        partial.rename(folder)
    return folder


def load_openvino(request: dict[str, Any]) -> tuple[str, int, Way]:
    """Load the pipeline with a prefix cache, both of the documentation's switches for throughput, and our limits."""
    import openvino_genai  # pyright: ignore[reportMissingImports]

    config = openvino_genai.SchedulerConfig()
    config.cache_size, config.enable_prefix_caching = request["pool_gib"], True
    config.max_num_batched_tokens, config.max_num_seqs, config.dynamic_split_fuse = BATCH_TOKENS, AT_ONCE, True
    dtype = {"bfloat16": "bf16", "float32": "f32"}[request["dtype"]]
    properties = {"INFERENCE_NUM_THREADS": request["threads"], "INFERENCE_PRECISION_HINT": dtype}
    properties |= {"KV_CACHE_PRECISION": dtype, "PERFORMANCE_HINT": "LATENCY"}
    folder = exported(Path(request["model"]))
    engine = openvino_genai.ContinuousBatchingPipeline(str(folder), config, "CPU", properties)
    return openvino_genai.__version__, request["pool_gib"] * 2**30, openvino(engine)


def openvino(engine: Any) -> Way:
    """Return the way of a pipeline. Its prefix cache cannot be emptied, so each call's prompts have other ids."""
    import numpy
    import openvino_genai  # pyright: ignore[reportMissingImports]
    from openvino import Tensor  # pyright: ignore[reportMissingImports]

    calls = 0

    def run(jobs: Jobs) -> Iterator[Step]:
        handles = []
        for job, (ids, wanted) in enumerate(jobs):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = wanted, True, False
            fresh = numpy.array([[token ^ calls for token in ids]], dtype=numpy.int64)
            handles.append(engine.add_request(job, Tensor(fresh), config))
        tokens: list[list[int]] = [[] for _ in jobs]
        while engine.has_non_finished_requests():
            engine.step()
            now = time.perf_counter()
            for job, handle in enumerate(handles):
                while handle.can_read():
                    tokens[job] += [token for one in handle.read().values() for token in one.generated_ids]
            yield Step(now, dict(enumerate(tokens)))

    @contextmanager
    def way() -> Iterator[Wave]:
        nonlocal calls
        calls = (calls + 1) % 128  # any id below a multiple of 128 stays below it
        yield run

    return way

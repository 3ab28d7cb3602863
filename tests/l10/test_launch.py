"""Lesson 10. The figures of `bench.py launch`: what counts as an operation, and how many a replayed step issues."""

from unittest import mock

from scripts.bench import launch

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config

CONFIG = Qwen3Config(16, 8, 16, 2, 2, 1, head_dim=4, max_position_embeddings=4096)


def counted(work):
    with launch.Operations() as operations:
        work()
    return operations.count


@pytest.mark.parametrize(
    ("work", "count"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.copy_(x + 1), 2),
        (lambda x: x.zero_(), 1),
        (lambda x: x.sort(), 1),
        (lambda x: torch.zeros(3), 1),
        (lambda x: x.view(2, 3)[0].unsqueeze(0), 0),
        (lambda x: x.chunk(2), 0),
        (lambda x: x.float(), 0),
        (lambda x: x.bfloat16(), 1),
        (lambda x: torch.empty(3), 0),
        (lambda x: x.new_empty(3), 0),
    ],
)
def test_what_computes_or_copies_is_counted_and_nothing_else(work, count):
    x = torch.ones(6)
    with torch.inference_mode():
        assert counted(lambda: work(x)) == count


def operations(layers, replayed, batch=3, fused=False):
    return launch.operations_of(launch.engine_of(launch.twin_of(CONFIG, layers, fused), batch, replayed))


def test_a_plain_step_issues_operations_in_every_layer_and_a_replayed_one_does_not():
    plain, replayed = ([operations(layers, path) for layers in (1, 2, 3)] for path in (False, True))
    assert plain[2] - plain[1] == plain[1] - plain[0] > 30, "every layer must issue the same operations"
    assert replayed[0] == replayed[1] == replayed[2] < plain[0], "a replay is one call, however deep the model"


def test_a_fused_layer_is_nine_launches():
    with mock.patch("mini_engine.kv.block_tensor.check_slots"):  # on a GPU it checks no slot
        plain, fused = ([operations(layers, False, fused=path) for layers in (2, 3)] for path in (False, True))
    assert fused[1] - fused[0] == 9, "four matrices, two norms, RoPE, SiLU times up, and attention"
    assert plain[1] - plain[0] == 48


def test_the_attention_kernel_is_counted_once_a_layer():
    engine = launch.engine_of(launch.twin_of(CONFIG, 5), 2, replayed=False)
    before = engine.runner.pool.kernel.calls
    engine.step()
    assert engine.runner.pool.kernel.calls - before == 5

"""Lesson 10. The figures of `bench.py launch`: what counts as an operation, and how many a replayed step issues."""

from unittest import mock

from scripts.bench import launch

from mini_engine.checkpoint.config import Qwen3Config

CONFIG = Qwen3Config(16, 8, 16, 2, 2, 1, head_dim=4, max_position_embeddings=4096)


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

"""Lesson 15. The Triton kernel with a window compiled in still fits an H100, and its splits follow the window."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from scripts.bench.compiled import Load, compile_merge

from tests.l3.test_triton_compiled import check

pytestmark = pytest.mark.reference  # no task is about this


@pytest.mark.ci
@pytest.mark.parametrize("q_len", [1, 2048], ids=["decode", "prefill"])
def test_kernels_with_a_window_fit_an_h100(q_len):
    check(Load(8, q_len, 2048, "bfloat16", window=512), 90)


def test_the_splits_of_a_decode_cover_its_window_and_no_more():
    assert [Load(8, 1, 4096, "bfloat16", window=w).config(90).splits for w in (256, 257, 512, 4096)] == [1, 2, 2, 16]
    assert compile_merge(Load(8, 1, 4096, "bfloat16", window=512), 90).spilled == 0

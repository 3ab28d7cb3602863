"""Lesson 11. The gated delta rule: one token at a time, many at once, and the convolution in front of it."""

import pytest
import torch
import torch.nn.functional as F

from mini_engine.hybrid.delta_rule import CHUNK, advance_conv, causal_conv, chunk_scan, l2norm, recurrent_step

HEADS, D_K, D_V = 3, 5, 7  # D_k and D_v differ: a transposed state cannot be multiplied


def inputs(length, seed=0, heads=HEADS):
    """Random q, k, v, g, beta of one sequence; g is small enough for old tokens to matter."""
    torch.manual_seed(seed)
    q, k = (l2norm(torch.randn(length, heads, D_K)) for _ in range(2))
    return q, k, torch.randn(length, heads, D_V), -0.1 * torch.rand(length, heads), torch.rand(length, heads)


def oracle(state, q, k, v, g, beta):
    """The recurrence of the page, in float64, head by head and number by number."""
    state = state.double().clone()
    out = torch.zeros(len(q), HEADS, D_V, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(HEADS):
            state[h] *= g[t, h].double().exp()
            known = torch.stack([sum(state[h, i, j] * k[t, h, i].double() for i in range(D_K)) for j in range(D_V)])
            delta = (v[t, h].double() - known) * beta[t, h].double()
            for i in range(D_K):
                state[h, i] += k[t, h, i].double() * delta
            out[t, h] = torch.stack([sum(state[h, i, j] * q[t, h, i].double() for i in range(D_K)) for j in range(D_V)])
    return out, state


@pytest.mark.task(1)
def test_without_a_key_the_state_only_fades():
    (q, k, v, g, beta), state = inputs(1), torch.randn(1, HEADS, D_K, D_V)
    out, after = recurrent_step(state.clone(), q, torch.zeros_like(k), v, g, beta)
    shapes = tuple(out.shape), tuple(after.shape)
    assert shapes == ((1, HEADS, D_V), (1, HEADS, D_K, D_V)), "return the outputs, then the new states"
    assert torch.allclose(after, state * g.exp()[..., None, None], atol=1e-6), (
        "a state fades by e^g; under a key of zeros nothing else is written"
    )


@pytest.mark.task(1)
def test_with_beta_0_a_token_writes_nothing():
    (q, k, v, g, beta), state = inputs(1), torch.randn(1, HEADS, D_K, D_V)
    _, after = recurrent_step(state.clone(), q, k, v, g, torch.zeros_like(beta))
    assert torch.allclose(after, state * g.exp()[..., None, None], atol=1e-6), (
        "beta is the part of the difference that is written; with beta 0 the state only fades, by e^g"
    )


@pytest.mark.task(1)
def test_a_step_fades_the_state_corrects_it_and_reads_it():
    parts, state = inputs(1), torch.randn(HEADS, D_K, D_V)
    out, after = recurrent_step(state[None].clone(), *parts)
    want_out, want_state = oracle(state, *parts)
    assert torch.allclose(after[0].double(), want_state, atol=1e-6), "fade the state first, then write the difference"
    assert torch.allclose(out.double(), want_out, atol=1e-6), "the output reads the state after the token was written"


@pytest.mark.task(1)
def test_what_a_token_wrote_is_read_back_with_its_key():
    """Beta 1 and no fading: the state then maps this key exactly to this value."""
    _, k, v, g, beta = inputs(1)
    out, _ = recurrent_step(torch.randn(1, HEADS, D_K, D_V), k, k, v, torch.zeros_like(g), torch.ones_like(beta))
    assert torch.allclose(out, v, atol=1e-5), "write the difference between v and what the state has, not v itself"


@pytest.mark.task(1)
def test_sequences_of_a_batch_do_not_see_each_other():
    states = torch.randn(4, HEADS, D_K, D_V)
    parts = inputs(4)
    out, after = recurrent_step(states.clone(), *parts)
    for i in range(4):
        alone, state = recurrent_step(states[i : i + 1].clone(), *(x[i : i + 1] for x in parts))
        why = f"row {i} of a batch must come out as it does alone: each row has a state of its own"
        assert torch.allclose(out[i], alone[0], atol=1e-6), why
        assert torch.allclose(after[i], state[0], atol=1e-6), why


@pytest.mark.parametrize("length", [1, 2, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_many_tokens_at_once_equal_one_at_a_time(length):
    state, parts = torch.randn(HEADS, D_K, D_V), inputs(length, seed=length)
    out, after = chunk_scan(state, *parts)
    want, step = [], state[None].clone()
    for t in range(length):
        one, step = recurrent_step(step, *(x[t : t + 1] for x in parts))
        want.append(one)
    assert out.shape == (length, HEADS, D_V)
    assert torch.allclose(out, torch.cat(want), atol=1e-4), f"{length} tokens at once give other outputs"
    assert torch.allclose(after, step[0], atol=1e-4), f"{length} tokens at once leave another state"


def test_a_cut_anywhere_changes_nothing():
    state, parts = torch.randn(HEADS, D_K, D_V), inputs(100)
    whole, last = chunk_scan(state, *parts)
    for cut in (1, 36, 64, 99):
        first, middle = chunk_scan(state, *(x[:cut] for x in parts))
        second, end = chunk_scan(middle, *(x[cut:] for x in parts))
        assert torch.allclose(torch.cat((first, second)), whole, atol=1e-4), f"a chunk of {cut} tokens loses the state"
        assert torch.allclose(end, last, atol=1e-4)


def test_strong_fading_neither_overflows_nor_gives_nan():
    q, k, v, _, beta = inputs(CHUNK)
    out, state = chunk_scan(torch.randn(HEADS, D_K, D_V), q, k, v, torch.full((CHUNK, HEADS), -50.0), beta)
    assert out.isfinite().all() and state.isfinite().all(), "exp of a difference must not be split into two factors"


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_sees_the_inputs_before_it_and_none_after(taps):
    torch.manual_seed(0)
    channels, length = 6, 9
    x, weight = torch.randn(length, channels), torch.randn(channels, taps)
    window = torch.cat((torch.zeros(taps - 1, channels), x))
    want = F.silu(F.conv1d(window.T[None], weight[:, None], groups=channels)[0].T)
    assert torch.allclose(causal_conv(window, weight), want, atol=1e-6)


@pytest.mark.task(2)
@pytest.mark.parametrize("taps", [4, 2, 1])  # the usual case first
@pytest.mark.parametrize("length", [9, 3, 2, 1])
def test_the_last_inputs_are_kept_for_the_next_step(taps, length):
    """Also when a step has fewer inputs than are kept: then some of the old ones stay."""
    inputs = torch.arange(1.0, 1 + length * 2).view(length, 2)  # 1 2, 3 4, …: two channels
    kept = -torch.arange(1.0, 1 + (taps - 1) * 2).view(2, taps - 1)
    both = torch.cat((kept.T, inputs))
    window, after = advance_conv(kept.clone(), inputs.clone())
    assert window.numel() == both.numel(), "return the window of all K - 1 + T inputs, then the last K - 1 of them"
    assert tuple(window.shape) == (taps - 1 + length, 2), "the window is [K - 1 + T, C]: channels last"
    assert torch.equal(window, both), "the window: the kept inputs, then the step's own"
    few = f"; a step of {length} has fewer, so some of the old ones stay" if length < taps - 1 else ""
    assert after.numel() == 2 * (taps - 1), f"with K = {taps}, keep K - 1 = {taps - 1} inputs{few}"
    assert tuple(after.shape) == (2, taps - 1), "what is kept is [C, K - 1], as before: channels first"
    assert torch.equal(after, both[length:].T), f"keep the last {taps - 1} inputs of the window, the latest one last"


@pytest.mark.task(2)
def test_one_input_at_a_time_gives_what_all_at_once_give():
    torch.manual_seed(0)
    inputs, kept, weight = torch.randn(7, 3), torch.randn(3, 3), torch.randn(3, 4)
    window, last = advance_conv(kept, inputs)
    want, outs = causal_conv(window, weight), []
    for x in inputs:
        window, kept = advance_conv(kept, x[None])
        outs.append(causal_conv(window, weight))
    assert torch.allclose(torch.cat(outs), want, atol=1e-6), "one input at a time sees what all at once see"
    assert torch.equal(kept, last), "one input at a time leaves what all at once leave"


@pytest.mark.task(2)
def test_a_batch_of_conv_states():
    kept, inputs = torch.randn(5, 3, 2), torch.randn(5, 1, 3)
    window, after = advance_conv(kept, inputs)
    assert tuple(window.shape) == (5, 3, 3), "in a batch of 5, each sequence has a window of its own: [5, K - 1 + T, C]"
    assert torch.equal(after[..., -1], inputs[:, 0]), "the latest input of a sequence is the last column of its state"
    assert torch.equal(after[..., 0], kept[..., 1]), "with one new input, the older of the two kept before goes"
